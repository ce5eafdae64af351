"""One request on its way through the engine: what was asked, who waits for it, and what each stage adds to it."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import inf

from ragkv.engine.detokenizer import Detokenizer
from ragkv.engine.generation import Sampling, Sequence
from ragkv.engine.kv_map import KVMap
from ragkv.engine.passes import Passes, Pause
from ragkv.engine.prefill_state import PrefilledContext, PrefillOptions
from ragkv.engine.session_cache import MethodChoice, Session
from ragkv.engine.token_scores import TokenScore
from ragkv.model.layer_pass import Pass
from ragkv.passages import Citation
from ragkv.report import Answer
from ragkv.timing import StepTimer
from ragkv.types import AskOptions, Hit

KVMapOf = Callable[[], KVMap]
"""Makes the map of what an answer was read from."""


class AnswerListener:
    """Who waits for an answer. This one hears nothing and waits for ever.

    The loop calls every method on the engine's thread.

    Attributes:
        shown: Whether somebody has seen a part of the answer, so that the question cannot begin again.
        outdated: Whether a document that the answer is read from was deleted or replaced.
    """

    shown = False
    outdated = False

    def working(self) -> AbstractContextManager[None]:
        """Return the context in which the engine works for this request."""
        return nullcontext()

    def expired(self) -> None:
        """Hear that the deadline has passed."""

    def gone(self) -> bool:
        """Return whether nobody waits any more. After True the request is dropped."""
        return False

    def prefilled(self, request: Request) -> None:
        """Hear that the logits of the first token are there."""

    def said(self, request: Request) -> None:
        """Hear that the answer got a token."""

    def used(self, tokens: int) -> None:
        """Hear how many tokens the prompt, or later the answer, has used."""

    def scored(self, tokens: abc.Sequence[TokenScore]) -> None:
        """Hear the log probabilities of the tokens of an answer that comes next, where the question asks for them."""

    def answered(self, answer: Answer, full_ms: float, draw_map: KVMapOf) -> None:
        """Hear the answer.

        Args:
            answer: The answer.
            full_ms: Milliseconds to the first token that a full recompute is estimated to take; 0 without measurements.
            draw_map: It may be called until this returns.
        """

    def failed(self, error: BaseException) -> None:
        """Hear why there is no answer."""


@dataclass(eq=False)
class Request:
    """State of one question. `Engine.prefill_passes` fills it, `Engine.finalize` ends it.

    In between its `sequence` is decoded, alone or with others. A request that is never finalized leaves nothing behind:
    its session is in no cache and gets no turn.

    Attributes:
        question: As it was asked.
        options: How it was asked.
        listener: Who waits for the answer.
        tenant: The tenant whose request it is.
        deadline: On the monotonic clock. The question expires then.
        work: Where its passes come from, once it has started.
        next: Its next pass, or what it waits for; None before its first.
        alone: Whether its passes run in no forward of others: one that it was in has failed.
        seconds: Of the engine's time that it took so far.
        attempts: How often it was prefilled.
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
    options: AskOptions = AskOptions()  # noqa: RUF009 - it is frozen
    listener: AnswerListener = field(default_factory=AnswerListener)
    tenant: str = ""
    deadline: float = inf
    work: Passes[Request] = field(init=False)
    next: Pass | Pause | None = None
    alone: bool = False
    seconds: float = 0.0
    attempts: int = 0
    question_tokens: tuple[int, ...] = ()
    method: MethodChoice = field(init=False)
    prefill_options: PrefillOptions = field(init=False)
    sampling: Sampling = field(init=False)
    timer: StepTimer = field(init=False)
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
    def conversation(self) -> tuple[str, str] | None:
        """Collection and name of the conversation that the question belongs to."""
        name = self.options.conversation
        return None if name is None else (self.options.collection, name)

    @property
    def citations(self) -> tuple[Citation, ...]:
        """The retrieved chunks, in prompt order and without marks: there is no answer yet."""
        return tuple(map(Citation.of, self.hits))

    @property
    def rows(self) -> int:
        """Rows of the next pass; 0 while there is none."""
        return len(self.next.tokens) if isinstance(self.next, Pass) else 0

    @property
    def pass_id(self) -> int:
        """The same for requests that wait for the same pass."""
        return id(self.next)

    @property
    def bytes(self) -> int:
        """Bytes of the cache that the next pass writes to."""
        return self.next.cache.bytes if isinstance(self.next, Pass) else 0

    @property
    def idle_seconds(self) -> float:
        """Seconds until it goes on, 0 when it can go on now."""
        return self.next.seconds if isinstance(self.next, Pause) else 0.0
