"""Whose document is ingested next: tenants share the engine's time equally, and so do the jobs of one tenant.

Each waiting job has at most one document open. One unit of work goes to the tenant that has had the least time, and
there to the job that has had the least. So a document of one line waits for some units of work of other tenants and not
for their sixty documents, and a small job is done before a large one that came earlier.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Hashable, Mapping
from typing import Generic, TypeVar

from ingest.job_table import WaitingJob, owner_of
from ingest.jobs import Jobs
from ingest.pipeline import IngestEngine
from ingest.progress import IngestStep

MOST_OPEN = 4
"""Documents of one tenant that are open at the same time. Each holds its text, its chunks and their vectors."""

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
        for each in sharers:
            self._used.setdefault(each, self._clock)
        return min(sharers, key=self._used.__getitem__)

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
        self._open: dict[int, Generator[IngestStep, None, str | None]] = {}
        self._alone: int | None = None
        self._waiting: dict[int, WaitingJob] = {}
        self._seen = -1
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
        started_count, self._seen = 0, -1
        try:
            while (job := self._next()) is not None:
                if job not in self._open:
                    self._open[job] = self._jobs.steps(engine, job)
                    started_count += 1
                step = self._advance(job)
                if step is not None:
                    yield step
            return started_count
        finally:
            for each in self._open.values():
                each.close()
            self._open.clear()

    def _next(self) -> int | None:
        """Return the job whose turn it is; None if nothing waits."""
        if self._seen != self._jobs.submitted:
            self._seen = self._jobs.submitted
            self._waiting = {each.job: each for each in self._jobs.waiting()}
        waiting = {job: each for job, each in self._waiting.items() if job not in self._open}
        wanted = {job: self._tenants_of[job] for job in self._open}
        wanted |= {job: owner_of(each.collection) for job, each in self._may_open(waiting, wanted).items()}
        self._tenants_of = wanted
        if not wanted:
            return None
        tenant = self._tenants.first(list(dict.fromkeys(wanted.values())))
        jobs = self._jobs_of.setdefault(tenant, FairShares())
        return jobs.first([job for job in sorted(wanted) if wanted[job] == tenant])

    def _may_open(self, waiting: Mapping[int, WaitingJob], opened: Mapping[int, str]) -> Mapping[int, WaitingJob]:
        """Return the jobs whose next document may be opened now.

        A document that was open when the process died may be what killed it. It is read alone, so that a next death is
        blamed on no other.
        """
        if self._alone in opened:
            return {}
        suspects = {job: each for job, each in waiting.items() if each.attempts}
        self._alone = min(suspects, default=None)
        if self._alone is not None:
            return {} if opened else {self._alone: suspects[self._alone]}
        count = list(opened.values()).count
        return {job: each for job, each in waiting.items() if count(owner_of(each.collection)) < MOST_OPEN}

    def _advance(self, job: int) -> IngestStep | None:
        """Do the next unit of work of a job's open document; None if the document is done."""
        started, tenant = time.monotonic(), self._tenants_of[job]
        try:
            return next(self._open[job])
        except BaseException as end:
            del self._open[job]
            self._seen = -1
            if isinstance(end, StopIteration):
                return None
            raise
        finally:
            self._charge(job, tenant, time.monotonic() - started)

    def _charge(self, job: int, tenant: str, seconds: float) -> None:
        tenants = set(self._tenants_of.values())
        self._tenants.charge(tenant, seconds, tenants)
        self._jobs_of[tenant].charge(job, seconds, [each for each, name in self._tenants_of.items() if name == tenant])
        self._jobs_of = {name: shares for name, shares in self._jobs_of.items() if name in tenants}
