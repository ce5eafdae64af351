"""Steps of ingest: what a generator of ingest yields after each unit of work, and how to run one to its end."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

from ragkv.types import Chunk, EmbeddedPassages

T = TypeVar("T")

ENDS = (GeneratorExit, KeyboardInterrupt, SystemExit)
"""What ends a program, and not a piece of its work. All else that is raised is a fault of the work, the panic of a
library in Rust included, which is no Exception."""

Stage = Literal["split", "embed", "encode", "commit", "index"]


@dataclass
class ChunkGroup:
    """Chunks of one document that are encoded next. Who drives the ingest may encode them with those of others.

    Attributes:
        chunks: The chunks, each with its collection.
        encoded: Whether they are encoded and stored; otherwise the ingest does it.
    """

    chunks: tuple[tuple[Chunk, str], ...]
    encoded: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the chunks."""
        return sum(len(chunk.tokens) for chunk, _ in self.chunks)


@dataclass(eq=False)
class PassageBatch:
    """Passages of one document that are embedded next. Who drives the ingest may embed them with those of others.

    Attributes:
        passages: What is embedded, each a title and a text.
        tokens: Tokens of all chunks of the document, which are encoded next.
        embedded: Their vectors and segments; None where the ingest embeds them itself.
    """

    passages: tuple[tuple[str, str], ...]
    tokens: int = 0
    embedded: EmbeddedPassages | None = None


class IngestStep(NamedTuple):
    """How far the ingest of a document is.

    Attributes:
        stage: What happens next, or in `split` what has just happened.
        done: Units done: characters in `split`, chunks in the other stages.
        total: Units of the whole stage.
        group: In `encode`, the chunks that are encoded next.
        passages: In `embed`, what is embedded next.
        writing: In `commit`, says whether KV of the document is still being written; the next step waits for it.
    """

    stage: Stage
    done: int
    total: int
    group: ChunkGroup | None = None
    passages: PassageBatch | None = None
    writing: Callable[[], bool] | None = None


class Paused(Exception):
    """Stops an ingest that will be taken up again. The KV encoded so far is kept for then."""


class IngestProgress(Protocol):
    """Called with stage, done and total of each IngestStep. It may raise to stop the work."""

    def __call__(self, stage: Stage, done: int, total: int, /) -> None: ...


def no_progress(stage: Stage, done: int, total: int) -> None:
    """Ignore the progress."""


def run_to_end(steps: Generator[IngestStep, None, T], progress: IngestProgress = no_progress) -> T:
    """Run all steps without a pause and return their result.

    What `progress` raises is thrown into the steps, so that they clean up before it propagates.
    """
    try:
        step = next(steps)
        while True:
            try:
                progress(step.stage, step.done, step.total)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
