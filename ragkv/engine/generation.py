"""From logits to an answer: sample a token, run one row, until something ends the answer.

A request is a `Sequence`. `generate` decodes one alone; a `Batch` (batch.py) decodes several, a step at a time.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder
from ragkv.model.execution.pooled_decode import PooledRequest
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Attention, Pass, append
from ragkv.timing import StepTimer


@dataclass(frozen=True)
class Sampling:
    """How answer tokens are chosen, and when they end.

    Attributes:
        max_tokens: Longest answer.
        temperature: 0 decodes greedily.
        top_p: Samples from the smallest set of tokens that holds this share of the probability.
        stop: Strings that end the answer. They are not part of it.
        seed: Seed of the sampler.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    stop: abc.Sequence[str] = ()
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """An answer as it was decoded.

    Attributes:
        tokens: Token ids. A stop token is not among them; the tokens of a stop string are.
        text: Text up to a stop string.
        ttft: Milliseconds from the request to the first token.
        steps: Passes of one row.
        stopped: A stop token or a stop string ended the answer; otherwise its length did.
        log_probabilities: Of each token, and of the stop token if one ended the answer, at temperature 1.
    """

    tokens: list[int]
    text: str
    ttft: float
    steps: int
    stopped: bool
    log_probabilities: list[float]


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return one token id from logits [vocabulary]."""
    if sampling.temperature <= 0:
        return int(logits.argmax())
    share = torch.softmax(logits.float().cpu() / sampling.temperature, dim=-1)
    share, order = share.sort(descending=True)
    # A token stays while the mass before it is below top_p, so the most likely one always stays.
    share = torch.where(share.cumsum(0) - share < sampling.top_p, share, 0.0)
    return int(order[torch.multinomial(share, 1, generator=generator)])


def log_probability(logits: Tensor, token: int) -> Tensor:
    """Return the natural logarithm of a token's probability under logits [vocabulary], as float32 [] on their device.

    It is a new tensor, so nothing waits for the device, and a buffer of logits may be written again.
    """
    scores = logits.float()
    return scores[token] - scores.logsumexp(-1)


class Sequence:
    """One request from its first logits on, as far as it is decoded. State of one request.

    Attributes:
        cache: Holds the rows of all tokens but the last one.
        sampling: How tokens are chosen.
        attention: Attention of a decode policy; None is dense.
        pooled: Decodes the sequence over the pool of KV blocks instead, from its `join` to its `leave`; None without.
        tokens: Token ids so far, without a stop token.
        stopped: A stop token or `should_stop` ended the sequence.
        steps: Passes so far.
        fault: What its attention raised in the latest pass; the sequence cannot continue.
    """

    def __init__(
        self,
        cache: ContextCache,
        logits: Tensor,
        position: int,
        sampling: Sampling,
        attention: Attention | None = None,
        should_stop: Callable[[abc.Sequence[int]], bool] | None = None,
        pooled: PooledRequest | None = None,
    ):
        """Start a sequence.

        Args:
            cache: The context.
            logits: Logits [vocabulary] of the first token.
            position: Position of the first token.
            sampling: How tokens are chosen.
            attention: Attention of a decode policy; None reads the whole context for every token.
            should_stop: Called with the tokens after each new one; True ends the sequence.
            pooled: Decodes the sequence over the pool of KV blocks, in place of `attention`.
        """
        self.cache, self.sampling, self.attention, self.pooled = cache, sampling, attention, pooled
        self.tokens: list[int] = []
        self.stopped, self.steps = False, 0
        self.fault: Exception | None = None
        self._logits, self._position, self._should_stop = logits, position, should_stop
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._log_probabilities: list[Tensor] = []

    @property
    def log_probabilities(self) -> list[float]:
        """Log probability of each sampled token at temperature 1, a stop token included."""
        return torch.stack(self._log_probabilities).tolist() if self._log_probabilities else []

    @property
    def position(self) -> int:
        """Position of the latest token."""
        return self._position + len(self.tokens) - 1

    @property
    def at_limit(self) -> bool:
        """Whether it has as many tokens as it may have."""
        return len(self.tokens) >= self.sampling.max_tokens

    @property
    def finished(self) -> bool:
        """Whether no further token comes."""
        return self.stopped or self.at_limit

    def sample(self, stop_ids: frozenset[int]) -> int | None:
        """Choose the next token from the latest logits; return None when the sequence has ended."""
        if self.finished:
            return None
        token = sample(self._logits, self.sampling, self._generator)
        self._log_probabilities.append(log_probability(self._logits, token))
        if token in stop_ids:
            self.stopped = True
            return None
        self.tokens.append(token)
        if self._should_stop is not None and self._should_stop(self.tokens):
            self.stopped = True
        return token

    def next_pass(self) -> Pass:
        """Return the pass of the latest token: one row."""
        attention = self._attend if self.attention else None
        return append(self.cache, self.tokens[-1:], self.position, attention=attention)

    def accept(self, logits: Tensor) -> None:
        """Take the logits [vocabulary] of that pass; the next token is sampled from them."""
        self._logits = logits
        self.steps += 1

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> Tensor:
        """Attend under the decode policy. A fault ends this sequence alone: the pass continues for the others."""
        if self.attention is not None and self.fault is None:
            try:
                return self.attention(layer, q, k, v, q_pos, k_pos, scale=scale)
            except Exception as fault:
                self.fault = fault
        return torch.zeros_like(q)


def decode_step(
    model: DecoderModel, sequences: abc.Sequence[Sequence], graph_decoder: GraphDecoder | None = None
) -> None:
    """Run the latest token of every sequence in one forward.

    Args:
        model: The model.
        sequences: Each has its own cache, attention and faults.
        graph_decoder: Decodes the dense sequences by a recorded graph; None runs them in the forward.
    """
    pooled = [each for each in sequences if each.pooled is not None]
    sequences = [each for each in sequences if each.pooled is None]
    if pooled:
        _decode_pooled(pooled)
    if graph_decoder is not None:
        dense = [each for each in sequences if each.attention is None]
        sequences = [each for each in sequences if each.attention is not None]
        _decode_dense(graph_decoder, dense)
    for each, logits in zip(sequences, model.forward([each.next_pass() for each in sequences]), strict=True):
        each.accept(logits[-1])


def _decode_dense(graph_decoder: GraphDecoder, sequences: abc.Sequence[Sequence]) -> None:
    """Run one recorded step for all of them."""
    caches, latest = [each.cache for each in sequences], [each.tokens[-1] for each in sequences]
    logits = graph_decoder.decode(caches, latest, [each.position for each in sequences])
    for each, row in zip(sequences, logits, strict=True):
        each.accept(row)


def _decode_pooled(sequences: abc.Sequence[Sequence]) -> None:
    """Run one step over the pool for all of them."""
    requests = [each.pooled for each in sequences if each.pooled is not None]
    latest, positions = [each.tokens[-1] for each in sequences], [each.position for each in sequences]
    logits = requests[0].decoder.decode(requests, latest, positions)
    for each, row in zip(sequences, logits, strict=True):
        each.accept(row)


def generate(model: DecoderModel, sequence: Sequence, graph_decoder: GraphDecoder | None = None) -> Iterator[int]:
    """Yield the token ids of one sequence, decoded alone.

    A token is yielded before its pass runs; the pass of the last token never runs.

    Args:
        model: The model.
        sequence: What to decode.
        graph_decoder: As in `decode_step`.
    """
    if sequence.pooled is not None:
        sequence.pooled.join()
    try:
        while (token := sequence.sample(model.stop_ids)) is not None:
            yield token
            if not sequence.finished:
                decode_step(model, [sequence], graph_decoder)
            if sequence.fault is not None:
                raise sequence.fault
    finally:
        if sequence.pooled is not None:
            sequence.pooled.leave()


def decode(
    model: DecoderModel,
    cache: ContextCache,
    logits: Tensor,
    position: int,
    sampling: Sampling,
    attention: Attention | None = None,
) -> Iterator[int]:
    """Yield token ids: the first from `logits` [vocabulary], each next one from a pass of one row.

    Ends at a stop token, which is not yielded, or after max_tokens. See `Sequence` for the arguments.
    """
    return generate(model, Sequence(cache, logits, position, sampling, attention))


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
    """

    def __init__(self, model: DecoderModel, stop: abc.Sequence[str], timer: StepTimer):
        self.text = ""
        self._tokenizer, self._checker, self._timer = model.tokenizer, StopChecker(stop), timer
        self._started, self._ttft = timer.total(), 0.0

    def __call__(self, tokens: abc.Sequence[int]) -> bool:
        """Decode the tokens so far; return whether a stop string ends the answer."""
        self._ttft = self._ttft or self._timer.total()
        self.text, stopped = self._checker.cut(self._tokenizer.decode(tokens))
        return stopped

    def stable_text(self) -> str:
        """Return the start of the answer that no later token changes."""
        return self._checker.stable_text(self.text)

    def complete(self, sequence: Sequence) -> Completion:
        """Return the answer of the sequence that called this. Call once, when the sequence has ended."""
        now = self._timer.total()
        self._timer.record("decode", self._started, now)
        return Completion(
            *(sequence.tokens, self.text, self._ttft or now, sequence.steps, sequence.stopped),
            sequence.log_probabilities,
        )
