"""Whose document is ingested next: tenants share the engine's time equally, and so do the jobs of one tenant.

Each waiting job has one document open, and more where small documents are embedded and encoded together (groups.py).
Documents whose KV is being written wait aside while others are encoded. One unit of work goes to the tenant that has
had the least time, and there to the job that has had the least. So a document of one line waits for some units of work
of other tenants and not for their sixty documents, and a small job is done before a large one that came earlier. A
group has documents of one tenant only, and its time is charged to their jobs by tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Generator, Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Generic, TypeVar

from ragkv.ingest.engine_contract import IngestEngine
from ragkv.ingest.groups import (
    MOST_TOGETHER,
    OpenDocument,
    embed_together,
    encode_together,
    waiting_passages,
    waiting_tokens,
)
from ragkv.ingest.job_queue import WaitingJob
from ragkv.ingest.job_table import owner_of
from ragkv.ingest.jobs import Jobs
from ragkv.ingest.pipeline import EMBED_BATCH
from ragkv.ingest.progress import IngestStep

MOST_OPEN = 4
"""Documents of one tenant that are open at the same time. Each holds its text, its chunks and their vectors."""
MOST_SMALL = MOST_TOGETHER
"""The same, as long as what waits in all of them together is less than one batch to embed and one group to encode."""
PREPARING = 0.5
"""Seconds by which a job may be ahead of one whose documents wait to be encoded, and still be served before it, so that
its documents join the group."""

Sharer = TypeVar("Sharer", bound=Hashable)


class FairShares(Generic[Sharer]):
    """Time used by those who share something, and who is next.

    The clock shows what everybody would have had if all had been served at once. A newcomer starts there: it neither
    catches up on the time before it came, nor do newcomers without end keep anybody waiting without end.
    """

    def __init__(self) -> None:
        """Start without anybody."""
        self._clock, self._used = 0.0, dict[Sharer, float]()

    def first(self, sharers: Collection[Sharer]) -> Sharer:
        """Return the sharer that has had the least; of two, the one that stands first."""
        for sharer in sharers:
            self._used.setdefault(sharer, self._clock)
        return min(sharers, key=self._used.__getitem__)

    def ahead(self, sharer: Sharer, other: Sharer) -> float:
        """Return the seconds that a sharer has had more than another."""
        return self._used.get(sharer, self._clock) - self._used.get(other, self._clock)

    def charge(self, sharer: Sharer, seconds: float, sharers: Collection[Sharer]) -> None:
        """Record that a sharer was served for a time, while `sharers`, itself included, wanted to be.

        Who wants nothing more is forgotten, but not one that has had more than its share.
        """
        self._used[sharer] = self._used.get(sharer, self._clock) + seconds
        self._clock += seconds / len(sharers)
        self._used = {each: used for each, used in self._used.items() if each in sharers or used > self._clock}


class IngestTurns:
    """The open documents of all jobs. It belongs to the thread that owns the engine."""

    def __init__(self, jobs: Jobs):
        """Take the jobs."""
        self._jobs = jobs
        self._open: dict[int, list[OpenDocument[str | None]]] = {}
        self._openable: Mapping[int, WaitingJob] = {}
        self._alone: int | None = None
        self._waiting: dict[int, WaitingJob] = {}
        self._seen, self._started = -1, 0
        self._tenants_of: dict[int, str] = {}
        self._tenants = FairShares[str]()
        self._jobs_of: dict[str, FairShares[int]] = {}

    def steps(self, engine: IngestEngine) -> Generator[IngestStep, None, int]:
        """Ingest until nothing waits, one unit of work at a time. See `Jobs.steps` for faults and for stopping.

        Yields:
            Each unit of work before a document is committed.

        Returns:
            The number of documents that were started.
        """
        self._started, self._seen = 0, -1
        try:
            with self._jobs.counting_deaths():
                while (job := self._next(engine)) is not None:
                    step = self._work(engine, job)
                    if step is not None:
                        yield step
                return self._started
        finally:
            opened = [*itertools.chain(*self._open.values())]
            self._open.clear()
            with ExitStack() as closing:  # each is closed, whatever closing another raises
                for document in opened:
                    closing.callback(document.steps.close)

    def _next(self, engine: IngestEngine) -> int | None:
        """Return the job whose turn it is; None if nothing waits."""
        if self._seen != self._jobs.submitted:
            self._seen = self._jobs.submitted
            self._waiting = {each.job: each for each in self._jobs.waiting()}
        opened = {job: self._tenants_of[job] for job in self._open}
        self._openable = self._may_open(self._waiting, opened, engine.group_tokens)
        self._tenants_of = opened | {job: owner_of(each.collection) for job, each in self._openable.items()}
        if not self._tenants_of:
            return None
        # Only where every job waits for a write is a write waited for.
        busy = {job: name for job, name in self._tenants_of.items() if job in self._openable or self._ready(job)}
        wanted = busy or self._tenants_of
        tenant = self._tenants.first(list(dict.fromkeys(wanted.values())))
        jobs = self._jobs_of.setdefault(tenant, FairShares())
        return jobs.first([job for job in sorted(wanted) if wanted[job] == tenant])

    def _may_open(
        self, waiting: Mapping[int, WaitingJob], opened: Mapping[int, str], group_tokens: int
    ) -> Mapping[int, WaitingJob]:
        """Return the jobs whose next document may be opened now.

        A job has one document open, and more while all that the tenant has open wait for each other and fill neither a
        batch nor a group. A document that was open when the process died may be what killed it. It is read alone, so
        that a next death is blamed on no other.
        """
        if self._alone in opened:
            return {}
        suspects = {job: each for job, each in waiting.items() if each.attempts}
        self._alone = min(suspects, default=None)
        if self._alone is not None:
            return {} if opened else {self._alone: suspects[self._alone]}
        found = {}
        for job, turn in waiting.items():
            beside = self._open_of(owner_of(turn.collection))
            small = all(one.is_held for one in beside) and self._has_room(beside, group_tokens)
            if (job not in opened and len(beside) < MOST_OPEN) or (small and len(beside) < MOST_SMALL):
                found[job] = turn
        return found

    def _has_room(self, documents: Sequence[OpenDocument[str | None]], group_tokens: int) -> bool:
        """Whether others may join what waits to be embedded and encoded."""
        return waiting_passages(documents) < EMBED_BATCH and waiting_tokens(documents) < group_tokens

    def _open_of(self, tenant: str) -> list[OpenDocument[str | None]]:
        """Return the open documents of a tenant, without those whose KV is being written."""
        return [each for job in self._open if self._tenants_of[job] == tenant for each in self._ready(job)]

    def _ready(self, job: int) -> list[OpenDocument[str | None]]:
        """Return the open documents of a job, without those whose KV is being written."""
        return [each for each in self._open.get(job, []) if not each.is_writing]

    def _work(self, engine: IngestEngine, job: int) -> IngestStep | None:
        """Do one unit of work for a job, and charge it; None if a document is done by it.

        Documents are taken to the steps at which they wait to be embedded and to be encoded, then embedded or encoded
        together with other documents of the tenant that wait.
        """
        started, tenant = time.monotonic(), self._tenants_of[job]
        job = self._preparing(job, tenant, engine.group_tokens)
        mine, shares = self._ready(job), {job: 1}
        try:
            busy = next((each for each in mine if not each.is_held or self._jobs.pausing), None)
            if busy is None and job in self._openable:
                busy = OpenDocument(self._jobs.steps(engine, job))
                self._open.setdefault(job, []).append(busy)
                self._started, self._seen = self._started + 1, -1
            if busy is None and not mine:
                busy = self._open[job][0]
            if busy is not None:
                return self._advance(job, busy)
            waiting = [*mine, *(each for each in self._open_of(tenant) if each not in mine)]
            together = _do_together(engine, waiting)
            if len(together) == 1:
                return self._advance(job, together[0])
            shares = {each: _share(self._open[each], together) for each in self._open}
            return together[0].step
        finally:
            self._charge(shares, tenant, time.monotonic() - started)

    def _preparing(self, job: int, tenant: str, group_tokens: int) -> int:
        """Return another job of the tenant whose documents may still join what a job waits for, or `job`."""
        if self._can_prepare(job) or not self._has_room(self._open_of(tenant), group_tokens):
            return job
        shares = self._jobs_of[tenant]
        others = [each for each, name in self._tenants_of.items() if name == tenant and self._can_prepare(each)]
        other = shares.first(others) if others else job
        return other if shares.ahead(other, job) <= PREPARING else job

    def _can_prepare(self, job: int) -> bool:
        """Whether there is something to do for a job before its documents wait for others."""
        return job in self._openable or any(not each.is_held for each in self._ready(job))

    def _advance(self, job: int, document: OpenDocument[str | None]) -> IngestStep | None:
        """Do the next unit of work of an open document; None if the document is done."""
        try:
            return document.run_step()
        except BaseException as end:
            self._open[job].remove(document)
            if not self._open[job]:
                del self._open[job]
            self._seen = -1
            if isinstance(end, StopIteration):
                return None
            raise

    def _charge(self, shares: Mapping[int, int], tenant: str, seconds: float) -> None:
        """Charge a time to a tenant, and to its jobs in these shares."""
        tenants, total = set(self._tenants_of.values()), sum(shares.values())
        self._tenants.charge(tenant, seconds, tenants)
        jobs = [each for each, name in self._tenants_of.items() if name == tenant]
        for job, share in shares.items():
            if share:
                self._jobs_of[tenant].charge(job, seconds * share / total, jobs)
        self._jobs_of = {name: shares for name, shares in self._jobs_of.items() if name in tenants}


def _do_together(engine: IngestEngine, documents: Sequence[OpenDocument[str | None]]) -> list[OpenDocument[str | None]]:
    """Embed what waits for that in documents, else encode a group of them. Returns the documents that had a part."""
    held = [each for each in documents if each.passages is not None]
    if held:
        embed_together(engine.retriever.embedder, held)
        return held
    return encode_together(engine, documents)


def _share(documents: Sequence[OpenDocument[str | None]], together: Sequence[OpenDocument[str | None]]) -> int:
    """Count the tokens, or the passages, that documents of a job had in what was done together."""
    steps = [each.step for each in documents if each in together and each.step is not None]
    tokens = sum(step.group.tokens for step in steps if step.group is not None)
    return tokens + sum(len(step.passages.passages) for step in steps if step.passages is not None)
