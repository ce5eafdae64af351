"""What `vllm_worker.py` times of vLLM, of ragkv's engine: decoding, and a load of questions over stored documents.

Everything runs in this process, as it does there: no HTTP, no search, no text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from benchmarks.asked import RandomEvidence
from benchmarks.peers.load import LoadedQuestion
from benchmarks.tiered import TieredBenchStore
from ragkv.engine.batch import Batch
from ragkv.engine.decoding import decode_step
from ragkv.engine.generation import Sampling
from ragkv.engine.generation import Sequence as Answer
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import WIDEST, GraphDecoder
from ragkv.model.kv_cache import ContextCache
from ragkv.recompute.base import Method
from ragkv.timing import StepTimer

WARM_UP = 8
"""Tokens of each answer that are not timed."""
BATCH_BYTES = 40 * 10**9
NO_STOPS: frozenset[int] = frozenset()


@torch.inference_mode()
def between_tokens(
    model: DecoderModel, decoder: GraphDecoder | None, size: int, requests: int, steps: int = 64
) -> float:
    """Return the median milliseconds between two tokens of requests that decode together.

    Args:
        model: the model.
        decoder: its recorded steps; None runs the model's forward.
        size: rows of each context. Their content is random, because dense decoding takes as long with any.
        requests: number of requests.
        steps: tokens of each that are timed.
    """
    answers = [_answer(model, size, WARM_UP + steps + 2) for _ in range(requests)]
    moments = list[float]()
    for _ in range(WARM_UP + steps + 1):
        for answer in answers:
            answer.sample(NO_STOPS)
        moments.append(time.perf_counter())
        decode_step(model, answers, decoder)
    return 1000 * statistics.median(after - before for before, after in pairwise(moments[WARM_UP:]))


class OwnServer:
    """Answers a load over stored documents."""

    def __init__(
        self, prefiller: Prefiller, stored: TieredBenchStore, documents: Sequence[tuple[int, ...]], method: Method
    ):
        """Take the documents, all of them in the store, and record what a load needs.

        Args:
            prefiller: prefills questions; it has the recorded steps.
            stored: the documents' KV.
            documents: token ids of each.
            method: how questions read them.
        """
        self._prefiller, self._stored, self._documents, self._method = prefiller, stored, documents, method
        self._seed = 0

    def serve(self, load: Sequence[LoadedQuestion], answer: int, decoder: GraphDecoder | None) -> list[float]:
        """Return the milliseconds from each question's arrival to its first token.

        Args:
            load: questions in the order of their arrival.
            answer: tokens of an answer.
            decoder: recorded steps.
        """
        batch = Batch(self._prefiller.model, WIDEST, BATCH_BYTES, decoder)
        waiting, asked_at, first = list(load), dict[int, float](), dict[int, float]()
        started = time.perf_counter()
        while waiting or batch.busy:
            if waiting and time.perf_counter() - started >= waiting[0].at and batch.free:
                question = waiting.pop(0)
                asked_at[batch.join(self.prefill(question, answer))] = question.at
            elif not batch.busy:
                time.sleep(max(0.0, waiting[0].at - (time.perf_counter() - started)))
                continue
            for event in batch.step():
                first.setdefault(event.id, time.perf_counter() - started)
        return [1000 * (first[number] - at) for number, at in asked_at.items()]

    def prefill(self, question: LoadedQuestion, answer: int) -> Answer:
        """Prefill a question; return its answer, of which nothing is decoded yet."""
        model, self._seed = self._prefiller.model, self._seed + 1
        chunks = [self._documents[number] for number in question.documents]
        sources = [self._stored.open(tokens, exact=first == 0) for first, tokens in enumerate(chunks)]
        found = RandomEvidence([len(tokens) for tokens in chunks], model.profile.block, self._seed).find()
        for source, evidence in zip(sources, found, strict=True):
            source.piece = replace(source.piece, evidence=evidence)
        options = PrefillOptions(answer + 2)
        context = self._prefiller.prefill_sparse(
            sources, question.tokens, self._method, StepTimer(model.device), options
        )
        return Answer(context.cache, context.logits, context.position, Sampling(answer))


def _answer(model: DecoderModel, size: int, tokens: int) -> Answer:
    cache = ContextCache(model.shape, size + tokens, model.dtype, model.devices)
    rows = torch.randn(size, model.shape.kv_heads, model.shape.head_dim, device=model.device).to(model.dtype)
    positions = torch.arange(size)
    for layer in range(model.shape.layers):
        cache.put(layer, rows, rows, positions)
    logits = torch.randn(model.config.vocab_size, device=model.device).to(model.dtype)
    return Answer(cache, logits, size, Sampling(tokens))
