"""`ragkv bench ttft`: time to first token of every method, on this machine, through the whole engine.

One collection holds exactly the chunks that are asked about, so every question has the same context. Before timing
starts, every method answers once: weights, store and page cache are warm, and the KV is in the store. Two times:

    ttft                 request received → first token, retrieval and loading from the store included
    without_retrieval    the same without the time of the search

A peer, llama.cpp's server with the same model as GGUF, may prefill the same prompt tokens in turn with the methods.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from benchmarks.llama_server import LlamaParams, LlamaServer, PeerTiming
from ragkv.config import Settings
from ragkv.engine.engine import Engine
from ragkv.engine.needles import make_needles
from ragkv.engine.registry import METHOD_NAMES
from ragkv.ingest.pipeline import ingest
from ragkv.model.model_cache import Notify
from ragkv.report import Report
from ragkv.types import AskOptions

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""

TIMED = tuple(name for name in METHOD_NAMES if name not in ("reuse-encoded", "random"))
"""Left out are methods that cost as much as reuse or as scout."""

STEPS = ("retrieve", "open", "plan", "load", "repair", "prefill")


@dataclass(frozen=True)
class TtftParams:
    """What is measured.

    Attributes:
        chunks: number of chunks.
        chunk_tokens: tokens per chunk, about.
        repeat: timed questions per method.
        methods: the first one is the base of the speedups.
        prefills: prefill policies; every method is timed under each, question by question. None: that of the settings.
        seed: seed of the documents.
        llama_server: llama.cpp's server, timed with the same prompts; None for no peer.
        gguf: the model file for it.
    """

    chunks: int = 8
    chunk_tokens: int = 512
    repeat: int = 10
    methods: tuple[str, ...] = TIMED
    prefills: tuple[str, ...] = ()
    seed: int = 7
    llama_server: Path | None = None
    gguf: Path | None = None


@dataclass(frozen=True)
class TtftRow:
    """One method under one prefill policy: medians in milliseconds over the timed questions, means of the ratios.

    Attributes:
        policy_speedup: median over the questions of `ttft` under the first policy / this one's, by the same method.
        speedup: `ttft` of full in the same run / this one's; likewise `speedup_without_retrieval`.
        steps: milliseconds by name.
    """

    method: str
    prefill: str
    ttft: float
    without_retrieval: float
    policy_speedup: float
    speedup: float
    speedup_without_retrieval: float
    sequence: float
    recompute: float
    load: float
    steps: dict[str, float]


@dataclass(frozen=True)
class PeerRow:
    """The peer's full prefill of the same prompts: medians in milliseconds.

    Attributes:
        ttft: request to response with one token, over HTTP.
        prompt: the prefill by the peer's own clock.
        tokens: prompt tokens that it computed.
        ratios: `ttft` of the peer / that of each method, under the first prefill policy.
    """

    name: str
    ttft: float
    prompt: float
    tokens: int
    ratios: dict[str, float]


@dataclass(frozen=True)
class TtftResult:
    """All rows, and the machine that they were measured on.

    Attributes:
        dtype: of weights and KV.
        context: tokens of all chunks.
        peer: None where there was none.
    """

    model: str
    device: str
    dtype: str
    threads: int
    store: str
    chunks: int
    context: int
    rows: tuple[TtftRow, ...]
    peer: PeerRow | None = None


def ttft(settings: Settings, params: TtftParams, progress: Progress, notify: Notify = lambda line: None) -> TtftResult:
    """Ingest generated documents into a temporary data folder and time questions about them.

    If the settings name a Redis store, it is used; the bench removes its entries afterwards.

    Args:
        settings: The settings.
        params: What is measured.
        progress: Is told how far it is.
        notify: As in `Engine.open`.
    """
    with tempfile.TemporaryDirectory(prefix="ragkv-ttft-") as folder:
        own = settings.model_copy(
            update={"data": Path(folder), "top_k": params.chunks, "chunk_tokens": params.chunk_tokens}
        )
        with Engine.open(own, notify) as engine:
            questions = _fill(engine, params, progress)
            try:
                return _measure(engine, params, questions, progress)
            finally:
                engine.evict(engine.catalog.keys())


def _fill(engine: Engine, params: TtftParams, progress: Progress) -> list[str]:
    wrapper = 32  # room for the wrapper and an overshoot of the last sentence, so that a document is one chunk
    needles = make_needles(
        params.seed,
        params.chunks,
        params.chunk_tokens - wrapper,
        max(8, params.repeat),
        lambda text: len(engine.model.prompt.plain(text)),
    )
    for i, document in enumerate(needles.documents):
        ingest(engine, document)
        progress("ingest", i + 1, params.chunks)
    return [question.question for question in needles.questions]


def _measure(engine: Engine, params: TtftParams, questions: Sequence[str], progress: Progress) -> TtftResult:
    prefills = params.prefills or (engine.settings.prefill,)
    reports: dict[tuple[str, str], list[Report]] = {case: [] for case in product(params.methods, prefills)}
    times: list[PeerTiming] = []
    with ExitStack() as running:
        peer = _start_peer(engine, params, running)
        for turn in range(-1, params.repeat):  # methods take turns, so that a slow moment of the machine affects all
            question = questions[max(0, turn) % len(questions)]
            for method, prefill in list(reports)[:: 1 if turn % 2 else -1]:  # none always runs behind the same one
                options = AskOptions(method=method, prefill=prefill, max_tokens=1)
                report = engine.answer(question, options).report
                reports[method, prefill] += [report] if turn >= 0 else []  # the first turn warms up
            if peer is not None:
                found = peer.first_token(_prompt(engine, question))
                times += [found] if turn >= 0 else []
            progress("ask", turn + 1, params.repeat)
    base = reports[params.methods[0], prefills[0]]
    rows = tuple(_row(case, found, reports[case[0], prefills[0]], base) for case, found in reports.items())
    return TtftResult(
        model=engine.model.name,
        device=str(engine.model.device),
        dtype=str(engine.model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        store=engine.settings.store.split(":")[0],
        chunks=params.chunks,
        context=base[0].tokens.context,
        rows=rows,
        peer=_peer_row(times, rows) if times else None,
    )


def _start_peer(engine: Engine, params: TtftParams, running: ExitStack) -> LlamaServer | None:
    """Start llama.cpp with as many threads as torch has, if it is asked for."""
    if params.llama_server is None or params.gguf is None:
        return None
    room = params.chunks * (params.chunk_tokens + 64) + 512
    llama = LlamaParams(
        params.llama_server, params.gguf, torch.get_num_threads(), min(room, engine.model.max_positions)
    )
    return running.enter_context(LlamaServer(llama))


def _prompt(engine: Engine, question: str) -> list[int]:
    """Return the tokens of S, all chunks and a question, as a full prefill has them but for the order of the chunks."""
    prompt, catalog = engine.model.prompt, engine.catalog
    chunks = [each for found in catalog.documents() for each in catalog.chunks_of(found.collection, found.id)]
    return [*prompt.prefix, *(token for chunk in chunks for token in chunk.tokens), *prompt.question(question)]


def _peer_row(times: Sequence[PeerTiming], rows: Sequence[TtftRow]) -> PeerRow:
    ttft = statistics.median(each.ms for each in times)
    prompt = statistics.median(each.prompt_ms for each in times)
    ratios = {row.method: ttft / row.ttft for row in rows if row.prefill == rows[0].prefill}
    return PeerRow("llama.cpp", ttft, prompt, times[0].prompt_tokens, ratios)


def _row(case: tuple[str, str], reports: Sequence[Report], first: Sequence[Report], base: Sequence[Report]) -> TtftRow:
    """case: method and prefill policy. first: of the same method under the first policy."""
    whole, bare = _times(reports)
    base_whole, base_bare = _times(base)
    ratios = {
        name: statistics.fmean(getattr(r.ratios, name) for r in reports) for name in ("sequence", "recompute", "load")
    }
    steps = {name: statistics.median(getattr(r.timings_ms, name) for r in reports) for name in STEPS}
    gained = statistics.median(f.timings_ms.ttft / r.timings_ms.ttft for f, r in zip(first, reports, strict=True))
    speedups = (gained, base_whole / whole, base_bare / bare)
    return TtftRow(case[0], case[1], whole, bare, *speedups, **ratios, steps=steps)


def _times(reports: Sequence[Report]) -> tuple[float, float]:
    """Median ttft with and without retrieval."""
    times = [report.timings_ms for report in reports]
    return statistics.median(t.ttft for t in times), statistics.median(t.ttft - t.retrieve for t in times)
