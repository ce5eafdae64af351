"""One request on its way through the engine: what was asked, and what each stage adds to it."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from ragkv.engine.detokenizer import Detokenizer
from ragkv.engine.generation import Sampling, Sequence
from ragkv.engine.prefill_state import PrefilledContext, PrefillOptions
from ragkv.engine.session_manager import MethodChoice, Session
from ragkv.passages import Citation
from ragkv.timing import StepTimer
from ragkv.types import AskOptions, Hit


@dataclass
class RequestState:
    """State of one question. `Engine.prefill` makes it, `Engine.finalize` ends it.

    In between its `sequence` is decoded, alone or in a `Batch` with others. A request that is never finalized leaves
    nothing behind: its session is in no cache and gets no turn.

    Attributes:
        question: As it was asked.
        options: How it was asked.
        question_tokens: Token ids of the question's part of the prompt.
        method: The method in use; it may differ from the one that was asked for.
        prefill_options: The prefill and the decode policy, and room for the answer.
        sampling: How answer tokens are chosen.
        timer: Steps of this request.
        reuse_refused: Why no stored KV may be used although the method would; "" where it may.
        speculation: Draft tokens of the answer, where nothing stands against it (speculation.py).
        read: The question as the model reads it: one that refers back has a name in place of its pronoun, if the model
            quotes spans.
        earlier: Earlier (question, answer), in order, and ids of the documents that they read.
        sought: What is searched for: the question, with an earlier one where it refers to that.
        hits: Retrieved chunks in prompt order.
        session: The conversation, or a fresh session for a single question.
        context: What to decode from.
        sequence: The answer as far as it is decoded.
        detokenizer: Text of the answer.
    """

    question: str
    options: AskOptions
    question_tokens: tuple[int, ...]
    method: MethodChoice
    prefill_options: PrefillOptions
    sampling: Sampling
    timer: StepTimer
    reuse_refused: str = ""
    speculation: bool = False
    read: str = ""
    earlier: tuple[abc.Sequence[tuple[str, str]], abc.Set[str]] = ((), frozenset())
    sought: str = ""
    hits: abc.Sequence[Hit] = ()
    session: Session = field(init=False)
    context: PrefilledContext = field(init=False)
    sequence: Sequence = field(init=False)
    detokenizer: Detokenizer = field(init=False)

    @property
    def citations(self) -> tuple[Citation, ...]:
        """The retrieved chunks, in prompt order and without marks: there is no answer yet."""
        return tuple(map(Citation.of, self.hits))
