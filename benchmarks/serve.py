"""`ragkv bench serve`: ask a running service a load of questions over HTTP, and time the streamed answers.

Open loop: a question is asked when it arrives, however many are still being answered. Its times count from its
arrival, not from the moment at which this program came to send it. So neither a slow service nor a busy client makes
the load lighter or a wait invisible (coordinated omission). Closed loop: a fixed number of questions is kept in flight,
and times count from the moment of sending.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load import PlannedQuestion
from benchmarks.serve_plan import ServeLoad
from ragkv.client import AsyncClient, Done, Refused, Said, Unreachable
from ragkv.client.models import Options
from ragkv.report import Report

COUNTER_SECONDS = 12.0
"""Longest wait until the service's counters of the pool agree with the reports. It renews them every five seconds."""
_POLL_SECONDS = 0.25

Clock = Callable[[], float]
"""Seconds since the start of the load."""


@dataclass(frozen=True)
class TimedAnswer:
    """What became of a question. All times are in seconds since the start of the load.

    Attributes:
        scheduled: When the question arrived; in a closed loop, when its turn came.
        sent: When the client began to send it.
        tokens: When each `token` event came. An event holds the text of one token or of a few.
        ended: When the last event came, or the error.
        error: Code of the error; "" for an answer.
        message: What the error says.
        report: The report of the answer; None for an error.
    """

    scheduled: float
    sent: float
    tokens: tuple[float, ...]
    ended: float
    error: str = ""
    message: str = ""
    report: Report | None = None

    @property
    def ttft(self) -> float:
        """Seconds from the arrival to the first token; to the end, if the answer has no text."""
        return (self.tokens[0] if self.tokens else self.ended) - self.scheduled


Ask = Callable[[PlannedQuestion, float, Clock], Awaitable[TimedAnswer]]
"""Asks a question that was scheduled at a time."""


@dataclass(frozen=True)
class PoolSums:
    """Sums of `decoding.pool` of reports, or the same counters of a service.

    Attributes:
        read: Blocks that decode steps read.
        hits: Blocks of those that were in the pool.
        loaded: Blocks that were copied from host memory.
    """

    read: int = 0
    hits: int = 0
    loaded: int = 0

    def since(self, earlier: PoolSums) -> PoolSums:
        """Return what was counted after an earlier reading."""
        return PoolSums(self.read - earlier.read, self.hits - earlier.hits, self.loaded - earlier.loaded)


@dataclass(frozen=True)
class ServiceFacts:
    """What a service says of itself.

    Attributes:
        model: Name of its model.
        method: Its own method, without parameters.
    """

    model: str
    method: str


@dataclass(frozen=True)
class LoadResult:
    """A load that was asked with one method.

    Attributes:
        method: Name of the method, as it was asked for.
        answers: One for each question, in the order of the load.
        counters: What the service's counters of the pool counted meanwhile; None without a pool.
    """

    method: str
    answers: tuple[TimedAnswer, ...]
    counters: PoolSums | None


async def service_facts(client: AsyncClient) -> ServiceFacts:
    """Ask a service what it is. Raises Refused and Unreachable."""
    for family in text_string_to_metric_families(await client.metrics()):
        if family.name == "ragkv_info" and family.samples:
            labels = family.samples[0].labels
            return ServiceFacts(labels["model"], labels["method"])
    raise Refused(503, "not_ready", f"the service at {client.url} has not started yet", None)


async def ask_load(
    client: AsyncClient, load: ServeLoad, options: Options, progress: Callable[[int, int], None]
) -> LoadResult:
    """Ask the questions of a load with one method.

    Args:
        client: Of the service. It must not retry, so that refusals are counted.
        load: The load.
        options: Options of all questions, the method among them.
        progress: Called with the questions that ended, and all.
    """

    async def ask(question: PlannedQuestion, scheduled: float, clock: Clock) -> TimedAnswer:
        asked: Options = {**options, "filter": load.filter(question)}
        return await ask_timed(client, question.text, asked, scheduled, clock)

    def ignore(done: int, total: int) -> None:
        pass

    earlier = pool_counters(await client.metrics())
    warm = await closed_loop(load.warmup, load.concurrency or 1, ask, ignore)
    before = await _counted(client, earlier, pool_sums(warm))
    if load.concurrency is None:
        answers = await open_loop(load.questions, ask, progress)
    else:
        answers = await closed_loop(load.questions, load.concurrency, ask, progress)
    after = await _counted(client, before, pool_sums(answers))
    counters = None if before is None or after is None else after.since(before)
    return LoadResult(options["method"] or "", tuple(answers), counters)


async def ask_timed(
    client: AsyncClient, question: str, options: Options, scheduled: float, clock: Clock
) -> TimedAnswer:
    """Ask a question, and time the events of its stream. An error becomes a part of the result."""
    sent, tokens, report = clock(), list[float](), None
    error, message = "broken_off", "the stream ended before the answer"
    try:
        async for event in client.stream(question, **options):
            if isinstance(event, Said):
                tokens.append(clock())
            elif isinstance(event, Done):
                report, error, message = event.answer.report, "", ""
    except Refused as refused:
        error, message = refused.code or str(refused.status), str(refused)
    except Unreachable as unreachable:
        error, message = "unreachable", str(unreachable)
    return TimedAnswer(scheduled, sent, tuple(tokens), clock(), error, message, report)


async def open_loop(
    questions: Sequence[PlannedQuestion], ask: Ask, progress: Callable[[int, int], None]
) -> list[TimedAnswer]:
    """Ask every question when it arrives, without waiting for answers. The questions are in order of arrival."""
    clock, ended, total = _clock(), 0, len(questions)

    async def answer(question: PlannedQuestion, at: float) -> TimedAnswer:
        nonlocal ended
        found = await ask(question, at, clock)
        ended += 1
        progress(ended, total)
        return found

    async with asyncio.TaskGroup() as group:
        tasks = []
        for question in questions:
            at = question.at or 0.0
            await asyncio.sleep(max(0.0, at - clock()))
            tasks.append(group.create_task(answer(question, at)))
    return [task.result() for task in tasks]


async def closed_loop(
    questions: Sequence[PlannedQuestion], concurrency: int, ask: Ask, progress: Callable[[int, int], None]
) -> list[TimedAnswer]:
    """Keep `concurrency` questions in flight until all are answered."""
    clock, found, waiting = _clock(), dict[int, TimedAnswer](), iter(enumerate(questions))

    async def ask_in_turn() -> None:
        for number, question in waiting:
            found[number] = await ask(question, clock(), clock)
            progress(len(found), len(questions))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(questions))):
            group.create_task(ask_in_turn())
    return [found[number] for number in range(len(questions))]


def pool_sums(answers: Sequence[TimedAnswer]) -> PoolSums:
    """Sum `decoding.pool` over the reports that have it."""
    pools = [each.report.decoding.pool for each in answers if each.report is not None]
    found = [pool for pool in pools if pool is not None]
    return PoolSums(*(sum(getattr(pool, name) for pool in found) for name in ("read", "hits", "loaded")))


def pool_counters(metrics: str) -> PoolSums | None:
    """Return the counters of the pool in /metrics; None if the service has no pool."""
    samples = {
        (sample.name, *sample.labels.values()): int(sample.value)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name in ("ragkv_pool_reads_total", "ragkv_pool_loaded_total")
    }
    if not samples:
        return None
    hits, misses = samples["ragkv_pool_reads_total", "hit"], samples["ragkv_pool_reads_total", "miss"]
    return PoolSums(hits + misses, hits, samples["ragkv_pool_loaded_total",])


async def _counted(client: AsyncClient, before: PoolSums | None, reported: PoolSums) -> PoolSums | None:
    """Return the counters as soon as they have grown by what the reports say, or as they are after COUNTER_SECONDS."""
    ends = time.monotonic() + COUNTER_SECONDS
    while True:
        now = pool_counters(await client.metrics())
        if before is None or now is None or now.since(before) == reported or time.monotonic() > ends:
            return now
        await asyncio.sleep(_POLL_SECONDS)


def _clock() -> Clock:
    started = time.perf_counter()
    return lambda: time.perf_counter() - started
