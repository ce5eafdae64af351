"""From logits to an answer: choose a token, run one row, until something says stop.

A request is a `Run`. Alone it is written by `decode`; several take every step together in a `Batch` (batch.py).
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Attention, Pass, append
from ragkv.timing import StepTimer


@dataclass(frozen=True)
class Sampling:
    """max_tokens: longest answer · temperature: 0 is greedy · top_p: smallest set of tokens that holds this share ·
    stop: strings that end the answer, not part of it · seed: of the draw."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    stop: abc.Sequence[str] = ()
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """An answer as it was decoded. tokens: the stop token is none of them, those of a stop string are · text: up to a
    stop string · ttft: milliseconds from the request to the first token · steps: passes of one row · stopped: by a stop
    token or a stop string, not because there was no room for more."""

    tokens: list[int]
    text: str
    ttft: float
    steps: int
    stopped: bool


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from logits [vocabulary]."""
    if sampling.temperature <= 0:
        return int(logits.argmax())
    share = torch.softmax(logits.float().cpu() / sampling.temperature, dim=-1)
    share, order = share.sort(descending=True)
    # A token stays while the mass before it is below top_p, so the most likely one always does.
    share = torch.where(share.cumsum(0) - share < sampling.top_p, share, 0.0)
    return int(order[torch.multinomial(share, 1, generator=generator)])


class Sequence:
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
        should_stop: Callable[[abc.Sequence[int]], bool] | None = None,
    ):
        """logits [vocabulary] of the first token, which stands at `position` · attention: None is dense: every token
        reads the whole context cache · over: told the tokens whenever there is one more; True ends the answer."""
        self.cache, self.sampling, self.attention = cache, sampling, attention
        self.tokens: list[int] = []
        self.stopped, self.steps = False, 0
        self.fault: Exception | None = None
        self._logits, self._position, self._should_stop = logits, position, should_stop
        self._generator = torch.Generator().manual_seed(sampling.seed)

    @property
    def position(self) -> int:
        """Where the latest token stands."""
        return self._position + len(self.tokens) - 1

    @property
    def at_limit(self) -> bool:
        """Whether it has all the tokens it may have."""
        return len(self.tokens) >= self.sampling.max_tokens

    @property
    def finished(self) -> bool:
        """Whether no token comes any more."""
        return self.stopped or self.at_limit

    def sample(self, stop_ids: frozenset[int]) -> int | None:
        """The next token, from the logits that are there; None where the answer has ended."""
        if self.finished:
            return None
        token = sample(self._logits, self.sampling, self._generator)
        if token in stop_ids:
            self.stopped = True
            return None
        self.tokens.append(token)
        if self._should_stop is not None and self._should_stop(self.tokens):
            self.stopped = True
        return token

    def next_pass(self) -> Pass:
        """The pass of the latest token: one row."""
        attention = self._attend if self.attention else None
        return append(self.cache, self.tokens[-1:], self.position, attention=attention)

    def accept(self, logits: Tensor) -> None:
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


def decode_step(
    model: DecoderModel, sequences: abc.Sequence[Sequence], graph_decoder: GraphDecoder | None = None
) -> None:
    """Each has its latest token read, all of them in one forward. Caches, attention and its faults are their own.

    steps: reads those whose decoding is dense, together; the others have their forward. None: there are none.
    """
    if graph_decoder is not None:
        dense, sequences = (
            [run for run in sequences if run.attention is None],
            [run for run in sequences if run.attention is not None],
        )
        _replay(graph_decoder, dense)
    for run, logits in zip(sequences, model.forward([run.next_pass() for run in sequences]), strict=True):
        run.accept(logits[-1])


def _replay(graph_decoder: GraphDecoder, sequences: abc.Sequence[Sequence]) -> None:
    """One recorded step for all of them."""
    caches, latest = [run.cache for run in sequences], [run.tokens[-1] for run in sequences]
    for run, logits in zip(
        sequences, graph_decoder.decode(caches, latest, [run.position for run in sequences]), strict=True
    ):
        run.accept(logits)


def generate(model: DecoderModel, sequence: Sequence, graph_decoder: GraphDecoder | None = None) -> Iterator[int]:
    """Yield the token ids of one request, alone. A token is yielded before it is read, and the last one is not read.

    steps: as in `advance`.
    """
    while (token := sequence.sample(model.stop_ids)) is not None:
        yield token
        if not sequence.finished:
            decode_step(model, [sequence], graph_decoder)
        if sequence.fault is not None:
            raise sequence.fault


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
    return generate(model, Sequence(cache, logits, position, sampling, attention))


class Detokenizer:
    """The text of an answer while it is decoded, for `Run`'s `over`: it ends at a stop string. Watch step: decode, from
    here to `spoken`, waiting for others included."""

    def __init__(self, model: DecoderModel, stop: abc.Sequence[str], timer: StepTimer):
        self.text = ""
        self._tokenizer, self._stop, self._timer = model.tokenizer, stop, timer
        self._started, self._ttft = timer.total(), 0.0

    def __call__(self, tokens: abc.Sequence[int]) -> bool:
        """There is one more token; whether the answer is over."""
        self._ttft = self._ttft or self._timer.total()
        self.text, stopped = cut_at_stop(self._tokenizer.decode(tokens), self._stop)
        return stopped

    def stable_text(self) -> str:
        """The start of the answer that later tokens will not change; without white space around it."""
        return stable_text(self.text, self._stop)

    def complete(self, sequence: Sequence) -> Completion:
        """The answer of the run that told this. Call once, when it has ended."""
        now = self._timer.total()
        self._timer.record("decode", self._started, now)
        return Completion(sequence.tokens, self.text, self._ttft or now, sequence.steps, sequence.stopped)


def cut_at_stop(text: str, stop: abc.Sequence[str]) -> tuple[str, bool]:
    """(text before the first stop string, whether there was one)."""
    ends = [at for at in (text.find(mark) for mark in stop if mark) if at >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


def stable_text(text: str, stop: abc.Sequence[str]) -> str:
    """Of the text of an answer that goes on, what may be shown: no half of a character, which decodes as U+FFFD at its
    end, nothing that may turn out to begin a stop string, no white space at either end."""
    whole = text.rstrip("\ufffd").rstrip()
    while whole.endswith("\ufffd"):
        whole = whole.rstrip("\ufffd").rstrip()
    held = max((size for mark in stop for size in range(1, len(mark)) if whole.endswith(mark[:size])), default=0)
    return whole[: len(whole) - held].strip()
