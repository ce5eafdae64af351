"""Which questions the benchmark commands ask: options that several of them have, and the sets that the options mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.common import err

if TYPE_CHECKING:
    from ragkv.evaluation.sets import QuestionSet
    from ragkv.model.decoder import DecoderModel
    from ragkv.types import Document

LongBench = Annotated[
    list[Path] | None,
    typer.Option("--longbench", help="Ask the questions of this LongBench JSONL file; again for more."),
]
Fit = Annotated[
    bool, typer.Option("--fit", help="Remove chunks from the middle of contexts that are too long for the model.")
]
Chunks = Annotated[int, typer.Option(min=2, max=24, help="Chunks in the prompt.")]
Sets = Annotated[int, typer.Option(min=1, help="Generated sets.")]
Questions = Annotated[int, typer.Option(min=1, max=60, help="Questions about each generated set.")]
GeneratedSeed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Ask generated needle questions of this seed, not the held-out sets."),
]
MaxTokens = Annotated[int, typer.Option(min=1, max=4096, help="Longest answer, in tokens.")]


@dataclass(frozen=True)
class SetOptions:
    """Which questions are asked: those of files, generated ones, or else the held-out sets.

    Attributes:
        longbench: LongBench files.
        fit: Whether contexts that are too long lose chunks from their middle.
        seed: Seed of generated sets; None generates none.
        chunks: Chunks of a generated set.
        sets: Generated sets.
        questions: Questions about each generated set.
        max_tokens: Longest answer.
    """

    longbench: Sequence[Path] = ()
    fit: bool = False
    seed: int | None = None
    chunks: int = 8
    sets: int = 4
    questions: int = 25
    max_tokens: int = 24

    def __post_init__(self) -> None:
        if self.longbench and self.seed is not None:
            raise typer.BadParameter("give --seed or --longbench, not both", param_hint="--longbench")
        if self.fit and not self.longbench:
            raise typer.BadParameter("it is for contexts of --longbench", param_hint="--fit")

    @property
    def named(self) -> bool:
        """Whether questions were named, so that they are asked without a further option."""
        return bool(self.longbench) or self.seed is not None


def named_sets(model: DecoderModel, options: SetOptions) -> dict[str, list[QuestionSet]]:
    """Return the sets that the options mean, by the name of the questions.

    Raises:
        InputError: A file cannot be read.
    """
    from benchmarks.answers import generated_sets, whole_sets

    if options.longbench:
        room = options.max_tokens if options.fit else 0
        return {path.stem: longbench_questions(model, [path], room) for path in options.longbench}
    if options.seed is None:
        return whole_sets(model, options.max_tokens)
    made = generated_sets(model, options.sets, options.chunks, options.questions, options.seed)
    return {f"needles of seed {options.seed}, {options.chunks} chunks": made}


def longbench_questions(model: DecoderModel, files: Sequence[Path], fit: int) -> list[QuestionSet]:
    """Return the sets of LongBench files, one a line, in chunks of the profile's size.

    Args:
        model: The model that is asked.
        files: The files.
        fit: Room for the answer, if contexts that are too long lose chunks from their middle; 0 cuts nothing.

    Raises:
        InputError: A file cannot be read.
    """
    from benchmarks.longbench import longbench_sets, shorten
    from ragkv.evaluation.quality import context_tokens
    from ragkv.ingest.chunker import split

    def cut(document: Document) -> list[tuple[str, str]]:
        return [(chunk.title, chunk.text) for chunk in split(document, model.prompt, model.profile.chunk_tokens)]

    read = [each for path in files for each in longbench_sets(path, cut)]
    if not fit:
        return read
    kept = [shorten(each, lambda some: context_tokens(model, some) + fit, model.max_positions) for each in read]
    cut_ones = sum(len(a.chunks) < len(b.chunks) for a, b in zip(kept, read, strict=True))
    err().print(f"{cut_ones} of {len(read)} contexts were too long and lost chunks from their middle")
    return kept
