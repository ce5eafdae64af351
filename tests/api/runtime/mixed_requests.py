"""Requests of all kinds that join, leave and are cancelled, through the loops that the engine's thread runs.

Each request is made from its number: another question, method, policy, length, temperature, and end. After every window
nothing runs any more: everything is free again, and a sample of the answers is compared with those of an engine that
answers one request after another.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from unittest.mock import patch

import torch

from ragkv.catalog import Catalog
from ragkv.engine.engine import Engine
from ragkv.engine.loop import ServingLoop
from ragkv.engine.opening import OpenedParts
from ragkv.engine.request import Request
from ragkv.errors import Expired
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.block_tables import BlockPoolMemory
from ragkv.model.execution.graph_decode import GraphDecoder
from ragkv.report import Answer
from ragkv.retrieval import Retriever
from ragkv.store import open_store
from ragkv.types import AskOptions
from tests.engine.listening import FutureListener, future_of
from tests.engine.test_session_manager import fill
from tests.ingest.reader import WordEmbedder
from tests.quick import quick_model, quick_settings
from tests.slots import check_slots

NAMES = ("harbour", "bridge", "mill", "tower", "quay", "chapel", "school", "lock", "barn", "inn")
METHODS = ("full", "reuse", "scout", "scout", "scout:chunks=2", "samkv-fusion", "cacheblend", "epic", "multi-infllm")
POOLED = "psa:least=0,part=0,threshold=0.6"
POLICIES = ("dense", "dense", "dense", POOLED, POOLED, "psa:block=8,least=0,part=0,threshold=0.6", "lfps", "loopserve")
SLOT = 1024
"""Bytes of a block of 16 rows of one kv head of the model, in float32."""
POOL_SLOTS = 60
RUNNING = 12
BATCH_BYTES = 700_000
HOST_BYTES = 300_000
TALKS = 4
"""Conversations of a window."""
SAMPLE = 12
"""Answers of a window that are asked again alone."""


@cache
def small_model() -> DecoderModel:
    """The quick model, in float32."""
    other = quick_model()
    weights = deepcopy(torch.nn.ModuleDict({"body": other.body, "head": other.lm_head})).float()
    loaded = type("Weights", (), {"model": weights["body"], "lm_head": weights["head"], "config": other.config})()
    loaded.parameters = weights.parameters
    return DecoderModel(loaded, other.tokenizer, other.profile, "small", "small")


def open_small(data: Path, paged: bool = False) -> Engine:
    """An engine with a pool for psa, and little memory for everything.

    paged: Dense answers read stored blocks in place. On a CPU the host tier is the memory of the model's device.
    """
    chosen = quick_settings(
        data,
        batch=RUNNING,
        batch_bytes=BATCH_BYTES,
        host_bytes=HOST_BYTES,
        pool_bytes=POOL_SLOTS * SLOT,
        conversation_bytes=400_000,
        group_tokens=256,
        graphs="paged" if paged else True,
    )
    store = open_store(chosen.store, chosen.data, chosen.store_timeout, chosen.store_ttl, chosen.store_bytes)
    catalog = Catalog.open(chosen.data / "catalog.sqlite")
    retriever = Retriever(catalog, WordEmbedder(), chosen.data / "index")
    with patch("ragkv.engine.assembly.make_graph_decoder", _graph_decoder if paged else lambda model, memory: None):
        return fill(Engine(chosen, OpenedParts(small_model(), store, catalog, retriever)), NAMES)


def _graph_decoder(model: DecoderModel, memory: BlockPoolMemory | None) -> GraphDecoder:
    """Return a decoder that runs the steps of a GPU by the reference kernels."""
    return GraphDecoder(model, memory=memory)


@dataclass
class Asked:
    """One request. seed: what it was made from; leaves: whether its client leaves."""

    seed: int
    question: Request
    leaves: bool

    @property
    def answer(self) -> Answer | None:
        """Its answer; None where it left or was too late."""
        future = future_of(self.question)
        return None if future.cancelled() or isinstance(future.exception(), Expired) else future.result()


def drafted(asked: Asked) -> bool:
    """Whether tokens of the answer were drafted."""
    speculation = None if asked.answer is None else asked.answer.report.decoding.speculation
    return speculation is not None and speculation.drafted > 0


def make_request(seed: int, window: int) -> Asked:
    """The request of a number: the same for the same number, its deadline apart."""
    dice = random.Random(seed)
    if dice.random() < 0.2:  # some are asked again and again
        dice = random.Random(-1 - seed % 17)
    asked = dice.sample(NAMES, dice.choice((1, 1, 2, 3)))
    text = f"Who built the {' and the '.join(asked)} of Tarn?" + " Say it again, please." * dice.choice((0, 0, 1, 4))
    method, policy = dice.choice(METHODS), dice.choice(POLICIES)
    talk = f"talk {window} {dice.randrange(TALKS)}" if dice.random() < 0.15 else None
    if talk is not None:  # dense: a turn that is read again is, and rows that a policy decoded would differ from it
        options = AskOptions(method="scout", conversation=talk, top_k=2, max_tokens=3, seed=seed)
    else:
        options = AskOptions(
            method=method,
            decode=policy,
            top_k=dice.choice((1, 2, 4, 7)),
            max_tokens=dice.choice((1, 2, 3, 5, 8, 20)),
            temperature=dice.choice((0.0, 0.0, 1.0)),
            seed=dice.randrange(5),
            speculation=dice.random() < 0.5,
        )
    late = dice.random() < 0.02
    deadline = time.monotonic() + dice.choice((0.0, 0.02)) if late else inf
    return Asked(seed, Request(text, options, FutureListener(), deadline=deadline), dice.random() < 0.12)


def drop_kept(engine: Engine) -> None:
    """Drop the states of conversations, and what memory keeps of chunks. No variable outlives it that holds one."""
    for session in engine.sessions.cache.sessions():
        engine.sessions.cache.drop(session.collection, session.name)
    for chunk in sorted(engine.catalog.keys()):
        engine.tiers.drop(chunk)
    (host,) = engine.tiers.stats().values()
    assert host.used == 0, host


@dataclass
class Drive:
    """An engine under requests, and one that answers alone.

    Attributes:
        engine: Answers together.
        alone: Answers one request after another.
        counts: How requests ended, and what was seen on the way.
        memory: (tensors, bytes) that were alive after each window.
    """

    engine: Engine
    alone: Engine
    counts: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loop = ServingLoop(self.engine)
        self.dice = random.Random(99)

    def run(self, requests: int, window: int) -> None:
        """Ask so many requests, and check everything after each window."""
        for first in range(0, requests, window):
            self._run_window([make_request(seed, first) for seed in range(first, min(first + window, requests))])

    def _run_window(self, asked: list[Asked]) -> None:
        ended: list[Asked] = []  # in the order in which they ended, as turns of a conversation follow each other
        coming, running = asked[::-1], list[Asked]()
        asked.clear()  # a request holds its cache, and the caller holds the list
        while coming or running:
            for _ in range(self.dice.choice((0, 0, 1, 2, 4))):
                if coming and self.loop.free and not self.loop.has_conversation(coming[-1].question.conversation):
                    running.append(coming.pop())
                    self.loop.start(running[-1].question, [each.question.question for each in coming[-3:]])
            if self.dice.random() < 0.05:
                self._lose_a_chunk()
            leaving = [each for each in running if each.leaves]
            if leaving and self.dice.random() < 0.3:
                future_of(self.dice.choice(leaving).question).cancel()
            self.loop.step()
            self._check_running()
            over = [each for each in running if future_of(each.question).done()]
            ended += over
            running = [each for each in running if each not in over]
        self.loop.step()  # drops those that were cancelled last
        self.counts.update("answered" if each.answer else "left" for each in ended)
        self._check_quiet()
        self._compare([each for each in ended if each.answer])
        del ended, coming, running, over, leaving
        if self.engine.graph_decoder is not None:  # its tables are those of the latest step
            self.engine.answer("Who built the mill of Tarn?", AskOptions(method="full", max_tokens=2))
        self._check_memory()

    def _lose_a_chunk(self) -> None:
        """Take the KV of a chunk out of the store and the host tier: the next question encodes it again."""
        keys = sorted(self.engine.catalog.keys())
        key = self.dice.choice(keys)
        self.engine.tiers.drop(key)
        self.engine.store.delete(key)
        self.counts["lost"] += 1

    def _check_running(self) -> None:
        batch, pool = self.loop._batch, self.engine.pooled_decoder.pool
        assert self.loop.count <= RUNNING
        assert batch.held <= BATCH_BYTES or batch.running == 1
        self.counts["most together"] = max(self.counts["most together"], batch.running)
        self.counts["most slots"] = max(self.counts["most slots"], pool.use().used)

    def _check_quiet(self) -> None:
        """Everything that a request takes is free again."""
        batch, pool = self.loop._batch, self.engine.pooled_decoder.pool
        assert (batch.running, batch.waiting, batch.held, self.loop.count) == (0, 0, 0, 0)
        check_slots(pool)
        assert (pool.use().used, pool.joined, pool.use().slots) == (0, 0, POOL_SLOTS)
        (host,) = self.engine.tiers.stats().values()
        assert host.pinned == 0
        assert self.engine.health()["status"] == "ok"

    def _compare(self, answered: list[Asked]) -> None:
        """Ask a sample again, alone, and all turns of one conversation.

        Not answers at temperature 1: of 12,000 tokens some have almost the same probability, and rounding orders them.
        """
        single = [
            each for each in answered if each.question.conversation is None and not each.question.options.temperature
        ]
        talks = [each for each in answered if each.question.conversation is not None]
        chosen = self.dice.sample(single, min(SAMPLE, len(single)))
        chosen += [each for each in single if drafted(each) and each not in chosen][:2]  # they are rare
        if talks:
            name = self.dice.choice(talks).question.conversation
            chosen += [each for each in talks if each.question.conversation == name]
        for each in chosen:
            alone, answer = self.alone.answer(each.question.question, each.question.options), each.answer
            assert answer is not None
            assert answer.answer == alone.answer, (each.seed, each.question.options)
            if each.question.conversation is None:  # after a turn that was left, the turns before it are read again
                assert answer.report.tokens == alone.report.tokens
                assert answer.report.chunks == alone.report.chunks
            self.counts["compared"] += 1
            self.counts["compared in place"] += answer.report.decoding.in_place > 0
            self.counts["compared in the pool"] += answer.report.decoding.pool is not None
            self.counts["compared with drafts"] += drafted(each)
            self.counts["compared turns"] += each.question.conversation is not None

    def _check_memory(self) -> None:
        """Note what is alive between windows. Head records may still be on their way that were fetched ahead."""
        found = self._count_alive()
        for _ in range(20):
            if not self.memory or found[0] <= self.memory[-1][0]:
                break
            time.sleep(0.1)
            found = self._count_alive()
        self.memory.append(found)

    def _count_alive(self) -> tuple[int, int]:
        """Count tensors and their bytes, without what the engines keep of conversations and chunks."""
        for engine in (self.engine, self.alone):
            drop_kept(engine)
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        return len(tensors), sum(storages.values())
