"""Compares the simulation with services that run: what it predicts from questions that were asked one at a time.

A round has two parts. First every question is asked alone, of one service after another: its work, and the time of
loads and decode steps. The simulation gets nothing else. Then the same questions arrive as a Poisson process, faster
than one after another, and go to the services in turn. Both parts of a round are minutes apart at most, so that other
work on the machine slows both alike.

What questions in one forward share cannot be seen while they are alone. SHARED is from docs/results/decode.md: a decode
step of one answer behind 7,168 tokens took 52 ms, and of eight 252.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.load import PlannedQuestion, arrive
from benchmarks.scale import ClusterParams, ScaleResult, ScaleSimulation
from benchmarks.scale_load import SimulatedQuestion
from benchmarks.scale_speeds import ReplicaSpeeds
from benchmarks.serve import Clock, TimedAnswer, ask_timed, closed_loop, open_loop
from ragkv.client import AsyncClient
from ragkv.client.models import Options
from ragkv.errors import InputError
from ragkv.report import Report

SHARED = 0.5
"""Part of a forward of one row that the questions of a forward share."""
_LEAST = 1e-6
"""Seconds that anything takes at least, where noise makes a measurement smaller."""


@dataclass(frozen=True)
class ReplayParams:
    """How services are asked.

    Attributes:
        rounds: Number of rounds.
        utilisation: Arrivals a second, over what the services answer one at a time.
        passes: Forwards until the first token.
        host_bytes: Host memory for KV of each service.
        seed: Of the arrivals.
    """

    rounds: int = 4
    utilisation: float = 0.5
    passes: int = 3
    host_bytes: int = 512 * 2**20
    seed: int = 1


@dataclass(frozen=True)
class CalibrationRound:
    """A round: what was measured, and what the simulation says of it.

    Attributes:
        alone: Answers to the questions one at a time.
        together: Answers to the questions under load.
        predicted: The simulation of the load.
    """

    alone: tuple[TimedAnswer, ...]
    together: tuple[TimedAnswer, ...]
    predicted: ScaleResult


async def calibrate(
    clients: Sequence[AsyncClient],
    questions: Sequence[PlannedQuestion],
    options: Options,
    params: ReplayParams,
    progress: Callable[[str, int, int], None],
) -> list[CalibrationRound]:
    """Ask running services, and predict them.

    Args:
        clients: One of each service, without retries. All have the same documents and settings.
        questions: The questions of a round.
        options: Options of all questions.
        params: How they are asked.
        progress: Called with a part of a round, the parts that are done, and all.

    Raises:
        InputError: A question was not answered.
    """
    found = []
    for number in range(params.rounds):
        progress("one at a time", 2 * number, 2 * params.rounds)
        alone = await closed_loop(questions, 1, _in_turn(clients, options), lambda done, total: None)
        _check(alone)
        seconds = statistics.fmean(each.ended - each.sent for each in alone)
        rate = params.utilisation * len(clients) / seconds
        progress("under load", 2 * number + 1, 2 * params.rounds)
        arrivals = arrive(questions, rate, params.seed + number)
        together = await open_loop(arrivals, _in_turn(clients, options), lambda done, total: None)
        _check(together)
        predicted = predict(alone, [each.scheduled for each in together], len(clients), params)
        found.append(CalibrationRound(tuple(alone), tuple(together), predicted))
    return found


def predict(
    alone: Sequence[TimedAnswer], arrivals: Sequence[float], replicas: int, params: ReplayParams
) -> ScaleResult:
    """Simulate a load from what its questions took one at a time.

    Args:
        alone: Answers to the questions of the load.
        arrivals: When each of them arrives.
        replicas: Services that take turns.
        params: Passes and host memory.
    """
    speeds, asked = _speeds(alone, params), list[SimulatedQuestion]()
    numbers = dict[str, int]()
    for answer, at in zip(alone, arrivals, strict=True):
        report = _report(answer)
        chunks = tuple(numbers.setdefault(chunk.chunk_id, len(numbers)) for chunk in report.chunks)
        asked.append(SimulatedQuestion(at, 0, chunks, max(1, report.tokens.generated), _work(answer, speeds)))
    cluster = ClusterParams(replicas, speeds, params.host_bytes, nodes=1, queue=len(asked))
    simulation = ScaleSimulation(cluster, len(numbers), "round-robin", 1)
    simulation.fill(asked, 0.0)
    return simulation.run(sorted(asked))


def _in_turn(
    clients: Sequence[AsyncClient], options: Options
) -> Callable[[PlannedQuestion, float, Clock], Coroutine[Any, Any, TimedAnswer]]:
    """Ask one service after another, in the order in which questions are sent."""
    count = 0

    async def ask(question: PlannedQuestion, scheduled: float, clock: Clock) -> TimedAnswer:
        nonlocal count
        client, count = clients[count % len(clients)], count + 1
        return await ask_timed(client, question.text, options, scheduled, clock)

    return ask


def _check(answers: Sequence[TimedAnswer]) -> None:
    for answer in answers:
        if answer.report is None:
            raise InputError(
                f"a question was not answered ({answer.message}), and the simulation predicts answers only"
            )


def _report(answer: TimedAnswer) -> Report:
    if answer.report is None:
        raise InputError(answer.message)
    return answer.report


def _speeds(alone: Sequence[TimedAnswer], params: ReplayParams) -> ReplicaSpeeds:
    """Return the speeds of a service that answers one question at a time."""
    reports = [_report(each) for each in alone]
    step = statistics.median(
        [r.timings_ms.decode / 1000 / (r.tokens.generated - 1) for r in reports if r.tokens.generated > 1] or [_LEAST]
    )
    chunks = sum(len(r.chunks) for r in reports)
    tokens, kv = sum(r.tokens.context for r in reports), sum(r.bytes.context_kv for r in reports)
    read = sum(r.bytes.heads + r.bytes.loaded for r in reports) / chunks
    host, store = _load_seconds(reports)
    start = statistics.median((r.timings_ms.retrieve + r.timings_ms.open) / 1000 for r in reports)
    first = statistics.fmean(each.ttft for each in alone) - statistics.fmean(r.timings_ms.load / 1000 for r in reports)
    own = max(_LEAST, (first - start - step) / params.passes - SHARED * step)
    return ReplicaSpeeds(
        chunk_tokens=round(tokens / chunks),
        token_bytes=round(kv / tokens),
        load=read / (kv / chunks),
        start=start,
        passes=params.passes,
        pass_shared=SHARED * step,
        pass_own=own,
        together=16,
        step_shared=SHARED * step,
        step_own=(1 - SHARED) * step,
        encode=0.0,
        link=read / host,
        read=read / store,
        node=read / store,
        latency=0.0,
    )


def _load_seconds(reports: Sequence[Report]) -> tuple[float, float]:
    """Return the seconds of a chunk that is loaded from host memory, and what one from the store takes more."""
    hits = np.array([[r.cache.hits.host + r.cache.hits.gpu + r.cache.hits.store, r.cache.hits.store] for r in reports])
    seconds = np.array([r.timings_ms.load / 1000 for r in reports])
    host, store = np.linalg.lstsq(hits.astype(float), seconds, rcond=None)[0]
    return max(_LEAST, float(host)), max(_LEAST, float(store))


def _work(answer: TimedAnswer, speeds: ReplicaSpeeds) -> float:
    """Return the work of a question over that of the mean one, as the simulation counts it."""
    report = _report(answer)
    shared = speeds.passes * speeds.pass_shared + (
        speeds.step_shared + speeds.step_own if len(answer.tokens) > 1 else 0
    )
    own = answer.ttft - report.timings_ms.load / 1000 - shared
    return max(0.05, own / (speeds.start + speeds.passes * speeds.pass_own))


@dataclass(frozen=True)
class PredictedFigure:
    """A figure of the rounds together, and what the simulation predicted.

    Attributes:
        name: What it is.
        measured: As it was measured.
        predicted: As it was predicted.
    """

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Return the difference over what was measured."""
        return self.predicted / self.measured - 1 if self.measured else float(self.predicted != 0)


def compare(rounds: Sequence[CalibrationRound]) -> list[PredictedFigure]:
    """Compare answers a second, times to first token in seconds, and the share of chunks found in host memory."""
    measured = [each.ttft for one in rounds for each in one.together]
    predicted = [ttft for one in rounds for ttft in one.predicted.ttft]
    reports = [_report(each) for one in rounds for each in one.together]
    host = sum(r.cache.hits.host + r.cache.hits.gpu for r in reports) / sum(len(r.chunks) for r in reports)
    simulated = sum(one.predicted.host for one in rounds), sum(len(r.chunks) for r in reports)
    seconds = sum(max(each.ended for each in one.together) for one in rounds)
    rows = [
        PredictedFigure("answers/s", len(measured) / seconds, len(predicted) / sum(r.predicted.seconds for r in rounds))
    ]
    for percent in (50, 90, 99):
        values = float(np.percentile(measured, percent)), float(np.percentile(predicted, percent))
        rows.append(PredictedFigure(f"TTFT p{percent}, s", *values))
    rows.append(PredictedFigure("TTFT mean, s", statistics.fmean(measured), statistics.fmean(predicted)))
    return [*rows, PredictedFigure("chunks in host memory", host, simulated[0] / simulated[1])]
