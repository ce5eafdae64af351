"""From logits to an answer: sample a token, run one row, until something ends the answer.

An answer is a `Sequence`. `generate` (decoding.py) decodes one alone, a `Batch` (batch.py) several, step by step. The
passes of a sequence with a `Drafter` (drafting.py) have rows for drafted tokens, and give more than one token.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ragkv.engine.drafting import Drafter
from ragkv.engine.logits import HostCopy, RowLogits, StepLogits
from ragkv.engine.structured import GrammarDrafter, Guide
from ragkv.model.execution.block_tables import PagedContext
from ragkv.model.execution.pooled_decode import PooledRequest
from ragkv.model.execution.split_context import SplitContext
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Attention, Pass, append
from ragkv.types import AskOptions


@dataclass(frozen=True)
class Sampling:
    """How answer tokens are chosen, and when they end.

    Attributes:
        max_tokens: Longest answer.
        temperature: 0 decodes greedily.
        top_p: Samples from the smallest set of tokens that holds this share of the probability.
        presence_penalty: Taken off the logit of every token that the answer has already; below 0 it is added.
        frequency_penalty: The same, as many times as the answer has the token.
        stop: Strings that end the answer. They are not part of it.
        seed: Seed of the sampler.
        schema: JSON schema that the answer follows; None for words.
        top_log_probabilities: Most likely tokens in place of each whose log probabilities are kept.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: abc.Sequence[str] = ()
    seed: int = 0
    schema: abc.Mapping[str, Any] | None = None
    top_log_probabilities: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is chosen, and nobody asks for others."""
        penalties = self.presence_penalty or self.frequency_penalty
        return self.temperature <= 0 and not penalties and not self.top_log_probabilities

    @classmethod
    def of(cls, options: AskOptions, max_tokens: int, stop: abc.Sequence[str]) -> Sampling:
        """Return what the options of a question say, with a longest length and strings that end the answer."""
        names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
        same = {name: getattr(options, name) for name in names}
        top = options.top_log_probabilities or 0
        return cls(max_tokens, stop=stop, schema=options.answer_schema, top_log_probabilities=top, **same)


def sample(
    row: RowLogits, said: abc.Sequence[int], sampling: Sampling, generator: torch.Generator, guide: Guide | None = None
) -> int:
    """Return one token id.

    Args:
        row: Logits of the token.
        said: Tokens before it in the answer.
        sampling: How it is chosen.
        generator: What its chance comes from.
        guide: Which tokens may be chosen; None allows all.
    """
    if guide is not None and (forced := guide.forced(1)):
        return forced[0]
    penalised = bool(said) and (sampling.presence_penalty or sampling.frequency_penalty)
    if sampling.temperature <= 0 and not penalised and (guide is None or guide.allows(row)):
        return row.best
    logits = row.logits.float().cpu() if guide is None else guide.masked(row.logits.float().cpu())
    if penalised:
        ids, counts = torch.tensor(said).unique(return_counts=True)
        logits = logits.index_add(0, ids, -sampling.presence_penalty - sampling.frequency_penalty * counts)
    if sampling.temperature <= 0:
        return int(logits.argmax())
    share, order = torch.softmax(logits / sampling.temperature, dim=-1).sort(descending=True)
    # A token stays while the mass before it is below top_p, so the most likely one always stays.
    share = torch.where(share.cumsum(0) - share < sampling.top_p, share, 0.0)
    return int(order[torch.multinomial(share, 1, generator=generator)])


class Sequence:
    """One answer from its first logits on, as far as it is decoded. State of one request.

    Attributes:
        cache: Holds the rows of all tokens but the last one, and behind them those of `draft`.
        sampling: How tokens are chosen.
        attention: Attention of a decode policy, a split context among them; None is dense.
        pooled: Decodes the sequence over the pool of KV blocks instead, from its `join` to its `leave`; None without.
        paged: Rows of the context that are read in place, beside those of `cache`; None without. Only recorded steps
            read them.
        drafter: Drafts tokens, which the passes verify; None gives every pass one row. Set it before the first pass,
            and only where neither `attention` nor `pooled` decodes the sequence: both decode a token a pass.
        guide: Which tokens may come next; None allows all.
        draft: Tokens with rows in the cache that are not verified yet.
        ready: The next token can be sampled; otherwise a pass must come first.
        tokens: Token ids so far, without a stop token.
        stopped: A stop token or `should_stop` ended the sequence.
        steps: Passes so far.
        fault: What its attention raised in the latest pass; the sequence cannot continue.
        other: A token whose log probability as the first one is kept, too; None keeps none.
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
        self.drafter: Drafter | GrammarDrafter | None = None
        self.guide: Guide | None = None
        self.paged: PagedContext | None = None
        self.draft: tuple[int, ...] = ()
        self.tokens: list[int] = []
        self.ready = True
        self.stopped, self.steps = False, 0
        self.fault: Exception | None = None
        self.other: int | None = None
        (self._logits,) = StepLogits(logits[None]).rows()
        self._position, self._should_stop = position, should_stop
        self._later = list[RowLogits]()
        self._generator = torch.Generator().manual_seed(sampling.seed)
        self._log_probabilities: list[HostCopy] = []
        self._likely: list[tuple[Tensor, Tensor]] = []
        self._unscored: list[tuple[RowLogits, int]] = []
        self._other_score: HostCopy | None = None

    @property
    def log_probabilities(self) -> list[float]:
        """Log probability of each sampled token at temperature 1, a stop token included."""
        self._score()
        return [float(score.read()) for score in self._log_probabilities]

    def scores(self, start: int) -> list[tuple[float, list[tuple[int, float]]]]:
        """Return the log probability of each sampled token from number `start` on, and those of the likeliest ones.

        Returns:
            As `log_probabilities`; with it (token id, log probability) of the `top_log_probabilities` most likely
            tokens in its place, best first.
        """
        self._score()
        chosen = [float(score.read()) for score in self._log_probabilities[start:]]
        likely = [list(zip(ids.tolist(), found.tolist(), strict=True)) for found, ids in self._likely[start:]]
        return list(zip(chosen, likely or [[]] * len(chosen), strict=True))

    @property
    def other_log_probability(self) -> float:
        """Log probability that `other` comes first, at temperature 1; 0.0 where no token was sampled."""
        self._score()
        return 0.0 if self._other_score is None else float(self._other_score.read())

    @property
    def position(self) -> int:
        """Position of the latest token."""
        return self._position + len(self.tokens) - 1

    @property
    def at_limit(self) -> bool:
        """Whether it has as many tokens as it may have."""
        return len(self.tokens) >= self.sampling.max_tokens

    @property
    def runs_ahead(self) -> bool:
        """Whether its next pass may run before its token is known: the likeliest one comes, and no draft behind it."""
        own = self.draft or self.guide or self.paged or self.pooled or self.attention
        drafts = isinstance(self.drafter, Drafter) and self.drafter.may_propose(self.tokens)
        return self.sampling.is_greedy and not own and not drafts

    @property
    def finished(self) -> bool:
        """Whether no further token comes."""
        return self.stopped or self.at_limit

    def sample(self, stop_ids: frozenset[int]) -> int | None:
        """Choose the next token from the latest logits; return None when the sequence has ended.

        A drafted token that equals it is verified, and the logits of its row are those of the next token.
        """
        if self.finished:
            return None
        self.ready = False
        token = sample(self._logits, self.tokens, self.sampling, self._generator, self.guide)
        self._unscored.append((self._logits, token))
        if token in stop_ids:
            self.stopped = True
            return None
        self.tokens.append(token)
        if self.guide is not None:
            self.guide.accept(token)
            self.stopped = self.guide.complete
        if self._should_stop is not None and self._should_stop(self.tokens):
            self.stopped = True
        self._verify(token)
        return token

    def _verify(self, token: int) -> None:
        """Accept the next drafted token if it is the sampled one, or drop the draft.

        The last token has no row in the cache, so a draft that ends the sequence is dropped from there on.
        """
        if self.drafter is None or not self.draft:
            return
        if token == self.draft[0]:
            self.drafter.accept()
            if not self.finished:
                self.draft, self.ready = self.draft[1:], True
                self._logits, *self._later = self._later
                return
        self.drop_draft()

    def make_draft(self, most: int | None = None) -> None:
        """Draft tokens for the next pass, at most `most`. The cache never needs more rows than without drafts."""
        if self.drafter is not None:
            left = self.sampling.max_tokens - len(self.tokens) - 1
            self.draft = self.drafter.propose(self.tokens, left if most is None else min(left, most))

    def drop_draft(self) -> None:
        """Drop what is left of the draft, and its rows, which are the last ones of every layer."""
        if self.draft:
            self.cache.truncate([length - len(self.draft) for length in self.cache.lengths])
            self.draft = ()

    def next_pass(self) -> Pass:
        """Return the pass of the latest token and of the draft: a row for each."""
        if isinstance(self.attention, SplitContext):
            return self.attention.append(self.tokens[-1], self.position, self._attend)
        attention, tokens = self._attend if self.attention else None, [self.tokens[-1], *self.draft]
        rows = append(self.cache, tokens, self.position, outputs=len(tokens), attention=attention)
        return replace(rows, decodes=True)

    def accept(self, logits: abc.Sequence[RowLogits]) -> None:
        """Take the logits of that pass; the next tokens are sampled from them.

        Args:
            logits: One row, or 1 + k of a pass with a draft of k tokens.
        """
        self._score()
        self._logits, *self._later = logits
        self.ready = True
        self.steps += 1

    def _score(self) -> None:
        """Compute the log probabilities of the latest tokens, behind their pass: a GPU would wait for the launches."""
        if self._unscored and self._other_score is None and self.other is not None:
            self._other_score = HostCopy(self._unscored[0][0].log_probability(self.other))
        self._log_probabilities += [HostCopy(row.log_probability(token)) for row, token in self._unscored]
        if top := self.sampling.top_log_probabilities:
            self._likely += [row.most_likely(top) for row, _ in self._unscored]
        self._unscored.clear()

    def close(self) -> None:
        """Drop rows that are not verified, and leave the pool and blocks in place. No further token is decoded."""
        self.drop_draft()
        if self.paged is not None:
            self.paged.close()
        if self.pooled is not None:
            self.pooled.leave()

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
