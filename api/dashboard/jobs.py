"""The ingest jobs: those that run, with their progress, and the finished ones, folded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from anyio import to_thread
from nicegui import ui

from ragkv.api.dashboard.buttons import quiet_button
from ragkv.api.dashboard.formatting import duration, quantity
from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.removal import cancel_job_of
from ragkv.errors import RagkvError
from ragkv.ingest.jobs import IngestJob

JOBS = 20
"""Latest jobs that are shown."""
_WORK = {"embed": "embedding", "encode": "encoding"}


class JobList:
    """The latest jobs of a tenant."""

    def __init__(self, engine_thread: EngineThread, caller: Caller):
        self._engine_thread, self._caller, self._tenant = engine_thread, caller, caller.tenant
        self._rows: dict[tuple[str, bool], _JobRow] = {}
        with ui.element("section").classes("card jobs").props('aria-label="Jobs"') as self._section:
            self._running = ui.element("div")
            with ui.element("details"):
                self._summary = ui.element("summary")
                with self._summary:
                    self._title = ui.label()
                self._finished = ui.element("div")
        self._section.set_visibility(False)

    async def refresh(self) -> list[IngestJob]:
        """Show the current state, and return the jobs, newest first."""
        jobs = await to_thread.run_sync(self._engine_thread.jobs.recent, JOBS, self._tenant.inside(""))
        keys = [(job.id, job.finished is not None) for job in jobs]
        if keys != list(self._rows):
            self._running.clear()
            self._finished.clear()
            self._rows = {}
            for job, key in zip(jobs, keys, strict=True):
                with self._finished if job.finished else self._running:
                    self._rows[key] = _JobRow(job, self._caller, self._cancel)
        for job, key in zip(jobs, keys, strict=True):
            self._rows[key].show(job)
        finished = [job for job in jobs if job.finished is not None]
        failed = sum(job.counts.failed for job in finished)
        self._title.set_text(
            f"{quantity(len(finished), 'job')} finished"
            + (f" · {quantity(failed, 'document')} failed" if failed else "")
        )
        self._section.set_visibility(bool(jobs))
        return jobs

    async def _cancel(self, job: IngestJob) -> None:
        try:
            await to_thread.run_sync(cancel_job_of, self._caller, job, self._engine_thread)
        except RagkvError as error:
            ui.notify(error.public)
        await self.refresh()


class _JobRow:
    """One job with its progress."""

    def __init__(self, job: IngestJob, caller: Caller, cancel: Callable[[IngestJob], Awaitable[None]]):
        self._caller, self._tenant = caller, caller.tenant
        with ui.row().classes("line"):
            ui.label(f"{self._tenant.outside(job.collection)} · {quantity(job.counts.total, 'document')}")
            self._status = ui.label().classes("note")
            self._stop = quiet_button("Cancel", lambda: cancel(job)).props("dense")
        self._bar = ui.linear_progress(0, show_value=False).props(f'rounded aria-label="Progress of job {job.id}"')

    def show(self, job: IngestJob) -> None:
        """Show the current state of the job."""
        counts = job.counts
        share = counts.done / counts.total
        if counts.done < counts.total and job.total and job.stage:
            share += job.done / job.total / counts.total
        faults = f" · {counts.failed} failed: {self._tenant.told(job.last_error.message)}" if job.last_error else ""
        left = f" · {duration(job.eta_seconds)} left" if job.finished is None and job.eta_seconds else ""
        self._status.set_text(f"{job.status} · {counts.done} of {counts.total} done{work_of(job)}{left}{faults}")
        self._bar.set_value(round(share, 3))
        self._bar.set_visibility(job.finished is None)
        self._stop.set_visibility(job.finished is None and self._caller.writes)


def work_of(job: IngestJob) -> str:
    """Say how far the document is that is being read, where it has several chunks; "" otherwise."""
    work = _WORK.get(job.stage)
    if job.finished is not None or work is None or job.total < 2:
        return ""
    return f" · {work} chunk {min(job.done + 1, job.total)} of {job.total}"
