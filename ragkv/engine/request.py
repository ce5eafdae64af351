"""Begun: a question that was read and whose answer is still to be decoded. `Engine.begin` makes it, `Engine.finish`
takes it; between the two its `run` is decoded, alone or in a `Batch` with others.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from ragkv.engine.generation import Detokenizer, Sequence
from ragkv.engine.prefill import PrefilledContext
from ragkv.engine.session_manager import Session
from ragkv.report import Citation
from ragkv.timing import StepTimer
from ragkv.types import Hit


@dataclass(frozen=True)
class RequestState:
    """asked: the question's token ids · hits: in prompt order · policies: of prefill and decoding, as they were asked
    for · refused: why no stored KV may be used, "" where it may · run: what is to be decoded; it tells `speech`.

    One that is never finished leaves nothing behind: its conversation is in no memory, and has no new turn.
    """

    question: str
    question_tokens: tuple[int, ...]
    hits: abc.Sequence[Hit]
    session: Session
    context: PrefilledContext
    policies: tuple[str, str]
    reuse_refused: str
    timer: StepTimer
    sequence: Sequence
    detokenizer: Detokenizer

    @property
    def citations(self) -> tuple[Citation, ...]:
        """The chunks that were retrieved for it, in prompt order."""
        return tuple(Citation(h.chunk.document_id, h.chunk.id, h.chunk.title, h.score) for h in self.hits)
