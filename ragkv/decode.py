"""From logits to an answer: choose a token, run one row, until something says stop.

A request is a `Run`. Alone it is written by `decode`; several take every step together in a `Batch` (batch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.context import ContextCache
from ragkv.model import DecoderModel
from ragkv.passes import Attention, Pass, append
from ragkv.steps import Steps
from ragkv.watch import Watch


@dataclass(frozen=True)
class Sampling:
    """max_tokens: longest answer · temperature: 0 is greedy · top_p: smallest set of tokens that holds this share ·
    stop: strings that end the answer, not part of it · seed: of the draw."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    seed: int = 0


@dataclass(frozen=True)
class Spoken:
    """An answer as it was decoded. tokens: the stop token is none of them, those of a stop string are · text: up to a
    stop string · ttft: milliseconds from the request to the first token · steps: passes of one row · stopped: by a stop
    token or a stop string, not because there was no room for more."""

    tokens: list[int]
    text: str
    ttft: float
    steps: int
    stopped: bool


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from logits [vocabulary]."""
    if sampling.temperature <= 0:
        return int(logits.argmax())
    share = torch.softmax(logits.float().cpu() / sampling.temperature, dim=-1)
    share, order = share.sort(descending=True)
    # A token stays while the mass before it is below top_p, so the most likely one always does.
    share = torch.where(share.cumsum(0) - share < sampling.top_p, share, 0.0)
    return int(order[torch.multinomial(share, 1, generator=generator)])


class Run:
    """One request from its first logits on, as far as it has come. State of one request.

    tokens: ids of the answer so far, no stop token among them · stopped: by a stop token, or by `over` · cache: holds
    the rows of all tokens but the last one · steps: passes so far · fault: of its attention, in the latest pass; it
    cannot go on.
    """

    def __init__(
        self,
        cache: ContextCache,
        logits: Tensor,
        position: int,
        sampling: Sampling,
        attention: Attention | None = None,
        over: Callable[[Sequence[int]], bool] | None = None,
    ):
        """logits [vocabulary] of the first token, which stands at `position` · attention: None is dense: every token
        reads the whole context cache · over: told the tokens whenever there is one more; True ends the answer."""
        self.cache, self.sampling, self.attention = cache, sampling, attention
        self.tokens: list[int] = []
        self.stopped, self.steps = False, 0
        self.fault: Exception | None = None
        self._logits, self._position, self._over = logits, position, over
        self._generator = torch.Generator().manual_seed(sampling.seed)

    @property
    def position(self) -> int:
        """Where the latest token stands."""
        return self._position + len(self.tokens) - 1

    @property
    def full(self) -> bool:
        """Whether it has all the tokens it may have."""
        return len(self.tokens) >= self.sampling.max_tokens

    @property
    def ended(self) -> bool:
        """Whether no token comes any more."""
        return self.stopped or self.full

    def choose(self, stop_ids: frozenset[int]) -> int | None:
        """The next token, from the logits that are there; None where the answer has ended."""
        if self.ended:
            return None
        token = choose(self._logits, self.sampling, self._generator)
        if token in stop_ids:
            self.stopped = True
            return None
        self.tokens.append(token)
        if self._over is not None and self._over(self.tokens):
            self.stopped = True
        return token

    def reading(self) -> Pass:
        """The pass of the latest token: one row."""
        attention = self._attend if self.attention else None
        return append(self.cache, self.tokens[-1:], self.position, attention=attention)

    def heard(self, logits: Tensor) -> None:
        """What that pass gave, [vocabulary]: the next token is chosen from it."""
        self._logits = logits
        self.steps += 1

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> Tensor:
        """A fault of its attention is its own: the pass goes on for the others, and what it gives here is dropped."""
        if self.attention is not None and self.fault is None:
            try:
                return self.attention(layer, q, k, v, q_pos, k_pos, scale=scale)
            except Exception as fault:
                self.fault = fault
        return torch.zeros_like(q)


def advance(model: DecoderModel, runs: Sequence[Run], steps: Steps | None = None) -> None:
    """Each has its latest token read, all of them in one forward. Caches, attention and its faults are their own.

    steps: reads those whose decoding is dense, together; the others have their forward. None: there are none.
    """
    if steps is not None:
        dense, runs = [run for run in runs if run.attention is None], [run for run in runs if run.attention is not None]
        _replay(steps, dense)
    for run, logits in zip(runs, model.forward([run.reading() for run in runs]), strict=True):
        run.heard(logits[-1])


def _replay(steps: Steps, runs: Sequence[Run]) -> None:
    """One recorded step for all of them."""
    caches, latest = [run.cache for run in runs], [run.tokens[-1] for run in runs]
    for run, logits in zip(runs, steps.read(caches, latest, [run.position for run in runs]), strict=True):
        run.heard(logits)


def write(model: DecoderModel, run: Run, steps: Steps | None = None) -> Iterator[int]:
    """Yield the token ids of one request, alone. A token is yielded before it is read, and the last one is not read.

    steps: as in `advance`.
    """
    while (token := run.choose(model.stop_ids)) is not None:
        yield token
        if not run.ended:
            advance(model, [run], steps)
        if run.fault is not None:
            raise run.fault


def decode(
    model: DecoderModel,
    cache: ContextCache,
    logits: Tensor,
    position: int,
    sampling: Sampling,
    attention: Attention | None = None,
) -> Iterator[int]:
    """Yield token ids, the first from `logits` [vocabulary], each next one from a pass of one row at position..

    Ends at a stop token (not yielded) or after max_tokens. attention: what a decode policy learned from the question,
    None: every token reads the whole context cache.
    """
    return write(model, Run(cache, logits, position, sampling, attention))


class Speech:
    """The text of an answer while it is decoded, for `Run`'s `over`: it ends at a stop string. Watch step: decode, from
    here to `spoken`, waiting for others included."""

    def __init__(self, model: DecoderModel, stop: Sequence[str], watch: Watch):
        self.text = ""
        self._tokenizer, self._stop, self._watch = model.tokenizer, stop, watch
        self._since, self._ttft = watch.total(), 0.0

    def __call__(self, tokens: Sequence[int]) -> bool:
        """There is one more token; whether the answer is over."""
        self._ttft = self._ttft or self._watch.total()
        self.text, stopped = cut_at_stop(self._tokenizer.decode(tokens), self._stop)
        return stopped

    def sure(self) -> str:
        """The start of the answer that later tokens will not change; without white space around it."""
        return sure(self.text, self._stop)

    def spoken(self, run: Run) -> Spoken:
        """The answer of the run that told this. Call once, when it has ended."""
        now = self._watch.total()
        self._watch.book("decode", self._since, now)
        return Spoken(run.tokens, self.text, self._ttft or now, run.steps, run.stopped)


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """(text before the first stop string, whether there was one)."""
    ends = [at for at in (text.find(mark) for mark in stop if mark) if at >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


def sure(text: str, stop: Sequence[str]) -> str:
    """Of the text of an answer that goes on, what may be shown: no half of a character, which decodes as U+FFFD at its
    end, nothing that may turn out to begin a stop string, no white space at either end."""
    whole = text.rstrip("\ufffd").rstrip()
    while whole.endswith("\ufffd"):
        whole = whole.rstrip("\ufffd").rstrip()
    held = max((size for mark in stop for size in range(1, len(mark)) if whole.endswith(mark[:size])), default=0)
    return whole[: len(whole) - held].strip()
