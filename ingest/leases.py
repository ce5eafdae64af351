"""Leases: which process ingests a running document, and until when that holds.

A process renews the leases of its documents while it works. A lease that has expired, or whose process is dead, is
lost: another process may queue the document again. A process whose lease was lost meanwhile, because its machine slept
for example, records nothing more of the document.

A document may also be lost by a process that lives: the catalogue did not answer when its end was to be recorded, or
crashed and forgot that it was. Such a document has killed nobody, and is queued again without being blamed for it.

Functions that take a transaction run inside that of the caller.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import bindparam, delete, select, update

from ragkv.catalog import Catalog
from ragkv.catalog.statements import one_of, upsert
from ragkv.catalog.tables import job_documents, jobs, leases
from ragkv.catalog.transaction import Transaction
from ragkv.errors import RagkvError
from ragkv.ingest.job_view import ACTIVE

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""Seconds after which a lease that is not renewed has expired."""
RENEW_SECONDS = 5.0

_MINE = (leases.c.job == bindparam("of"), leases.c.position == bindparam("at"), leases.c.worker == bindparam("by"))
_TAKE = upsert(leases, ["job", "position"])
_RENEW = update(leases).where(*_MINE)
_DROP = delete(leases).where(leases.c.job == bindparam("of"), leases.c.position == bindparam("at"))
_RUNNING = (
    select(job_documents.c.job, job_documents.c.position, job_documents.c.attempts, leases.c.worker, leases.c.expires)
    .select_from(
        jobs.join(job_documents, job_documents.c.job == jobs.c.row).outerjoin(
            leases, (leases.c.job == job_documents.c.job) & (leases.c.position == job_documents.c.position)
        )
    )
    .where(one_of(jobs.c.status, ACTIVE), job_documents.c.status == "running")
)


class JobPlace(NamedTuple):
    """The row of a document: its job, and its position in the job."""

    job: int
    position: int


class LostDocument(NamedTuple):
    """A running document that nobody ingests.

    Attributes:
        place: Its row.
        attempts: How often it was started.
        died: Whether the process that started it is dead, as far as is known.
    """

    place: JobPlace
    attempts: int
    died: bool


def take(transaction: Transaction, place: JobPlace, worker: str) -> None:
    """Give the lease of a document to a worker."""
    expires = transaction.now() + LEASE_SECONDS
    transaction.execute(_TAKE, {"job": place.job, "position": place.position, "worker": worker, "expires": expires})


def renew(transaction: Transaction, held: Sequence[JobPlace], worker: str) -> None:
    """Renew the leases that the worker still has."""
    expires = transaction.now() + LEASE_SECONDS
    for place in held:
        transaction.execute(_RENEW, {"of": place.job, "at": place.position, "by": worker, "expires": expires})


def drop(transaction: Transaction, place: JobPlace) -> None:
    """Delete the lease of a document that does not run any more."""
    transaction.execute(_DROP, {"of": place.job, "at": place.position})


def lost(transaction: Transaction, worker: str = "", held: Collection[JobPlace] | None = None) -> list[LostDocument]:
    """Return the documents that run nowhere.

    Their lease has expired, belongs to a dead process of this machine, does not exist, as a release without leases
    started them, or is one of `worker` that it does not work on.

    Args:
        transaction: The transaction.
        worker: Whose leases are looked at besides.
        held: What it works on; None if it begins anew, because what it ran ended whatever ran it.
    """
    found, now = transaction.execute(_RUNNING).fetchall(), None
    documents = list[LostDocument]()
    for job, position, attempts, holder, expires in found:
        now = transaction.now() if now is None else now
        place = JobPlace(job, position)
        if holder and holder == worker:
            if held is None or place not in held:
                documents.append(LostDocument(place, attempts, held is None))
        elif holder is None or expires <= now or is_dead(holder):
            documents.append(LostDocument(place, attempts, holder is None or not is_alive(holder)))
    return documents


def new_worker() -> str:
    """Return a name for what takes leases: machine, process, when the process began, and a unique part."""
    return "/".join((_machine(), str(os.getpid()), _began(os.getpid()), uuid.uuid4().hex))


def is_dead(worker: str) -> bool:
    """Whether the process of a worker is known to be dead. Of another machine's, nothing is known."""
    machine, pid, began, _ = worker.split("/")
    if machine != _machine():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it belongs to somebody else, or the number is none
        return False
    return _began(int(pid)) != began


def is_alive(worker: str) -> bool:
    """Whether the process of a worker is known to live. Of another machine's, nothing is known."""
    return worker.split("/")[0] == _machine() and not is_dead(worker)


def _machine() -> str:
    """Name what process ids belong to: the boot of this machine, and the container."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}".replace("/", "")
    return platform.node().replace("/", "")


def _began(pid: int) -> str:
    """Return when a process began, in ticks of its machine; "" where that cannot be found out."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "dead" if fields[0] == "Z" else fields[19]
    return ""


class LeaseKeeper:
    """Renews the leases of the documents that a process ingests, in a thread of its own. Thread-safe.

    Attributes:
        worker: Who holds the leases.
    """

    def __init__(self, catalog: Catalog):
        """Take the catalogue. The thread starts with the first document and ends when there is none."""
        self.worker = new_worker()
        self._catalog = catalog
        self._held = set[JobPlace]()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()  # never set: the thread waits for time to pass

    def hold(self, place: JobPlace) -> None:
        """Renew the lease of a document from now on."""
        with self._lock:
            self._held.add(place)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
                self._thread.start()

    def let_go(self, place: JobPlace) -> None:
        """Renew it no more."""
        with self._lock:
            self._held.discard(place)

    @property
    def held(self) -> frozenset[JobPlace]:
        """The documents that are worked on."""
        with self._lock:
            return frozenset(self._held)

    def _run(self) -> None:
        while True:
            self._idle.wait(RENEW_SECONDS)
            with self._lock:
                held = sorted(self._held)
                if not held:
                    self._thread = None
                    return
            try:
                with self._catalog.write(alone=False, durable=False) as transaction:
                    renew(transaction, held, self.worker)
            except RagkvError as error:
                logger.warning("the leases of %d documents are not renewed now: %s", len(held), error)
