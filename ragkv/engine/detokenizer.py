"""The text of an answer while it is decoded, and the stop strings in it."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from ragkv.engine.generation import Sequence
from ragkv.engine.token_scores import AnswerScores, TokenScore
from ragkv.model.decoder import DecoderModel
from ragkv.timing import StepTimer


@dataclass(frozen=True)
class Completion:
    """An answer as it was decoded.

    Attributes:
        tokens: Token ids. A stop token is not among them; the tokens of a stop string are.
        text: Text up to a stop string.
        ttft: Milliseconds from the request to the first token.
        steps: Passes.
        stopped: A stop token or a stop string ended the answer; otherwise its length did.
        log_probabilities: Of each token, and of the stop token if one ended the answer, at temperature 1.
        unknown_log_probability: That the answer would begin as `unknown` does.
    """

    tokens: list[int]
    text: str
    ttft: float
    steps: int
    stopped: bool
    log_probabilities: list[float]
    unknown_log_probability: float = 0.0


class StopChecker:
    """Finds stop strings in the text of an answer."""

    def __init__(self, stop: abc.Sequence[str]):
        self._stop = tuple(mark for mark in stop if mark)

    def cut(self, text: str) -> tuple[str, bool]:
        """Return the text before the first stop string, and whether there is one."""
        ends = [at for at in (text.find(mark) for mark in self._stop) if at >= 0]
        return (text[: min(ends)], True) if ends else (text, False)

    def stable_text(self, text: str) -> str:
        """Return the part of an unfinished text that no later token changes.

        It ends in no half of a character, which decodes as U+FFFD, and in nothing that may become a stop string. It has
        no white space at either end.
        """
        whole = text.rstrip("\ufffd").rstrip()
        while whole.endswith("\ufffd"):
            whole = whole.rstrip("\ufffd").rstrip()
        sizes = (size for mark in self._stop for size in range(1, len(mark)) if whole.endswith(mark[:size]))
        return whole[: len(whole) - max(sizes, default=0)].strip()


class Detokenizer:
    """The text of an answer while it is decoded; `should_stop` of a `Sequence`.

    Times the step decode, from here to `complete`; waiting for other requests is included.

    Attributes:
        text: Text so far, cut at a stop string.
        scores: Scores of the tokens; None where nobody asks for them.
    """

    def __init__(self, model: DecoderModel, stop: abc.Sequence[str], timer: StepTimer, beginning: str = ""):
        """Start a text.

        Args:
            model: Whose tokens they are.
            stop: Strings that end the answer.
            timer: Times the step.
            beginning: What the answer begins with; its tokens are part of the prompt.
        """
        self._tokenizer, self._checker, self._timer = model.tokenizer, StopChecker(stop), timer
        self._first = model.prompt.answer(beginning) if beginning else ()
        self._given = self.text = self._tokenizer.decode(self._first) if beginning else ""
        self.scores: AnswerScores | None = None
        self._started, self._ttft = timer.total(), 0.0

    def __call__(self, tokens: abc.Sequence[int]) -> bool:
        """Decode the tokens so far; return whether a stop string ends the answer."""
        self._ttft = self._ttft or self._timer.total()
        text, stopped = self._checker.cut(self._tokenizer.decode([*self._first, *tokens])[len(self._given) :])
        self.text = self._given + text
        return stopped

    def stable_text(self) -> str:
        """Return the start of the answer that no later token changes."""
        return self._checker.stable_text(self.text)

    def scores_of(self, text: str) -> tuple[TokenScore, ...]:
        """Return the scores of the tokens that a text is made of: `text`, or its start. None without `scores`."""
        return () if self.scores is None else self.scores.of(text[len(self._given) :])

    def complete(self, sequence: Sequence) -> Completion:
        """Return the answer of the sequence that called this. Call once, when the sequence has ended."""
        now = self._timer.total()
        self._timer.record("decode", self._started, now)
        return Completion(
            *(sequence.tokens, self.text, self._ttft or now, sequence.steps, sequence.stopped),
            sequence.log_probabilities,
            sequence.other_log_probability,
        )
