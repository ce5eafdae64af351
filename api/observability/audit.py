"""The audit log: who added, replaced or deleted which documents, and what came of it.

    {"time", "tenant", "subject", "action", "documents", "collection", "result", "job_id", "request_id"}

Each event is a line of the log, by the logger `ragkv.audit`, whatever the level of the log is. RAGKV_AUDIT_LOG names a
file that gets the same as a JSON line. The file is opened for each line, so it may be moved away at any time.

An ingest is two events: `accepted` with all documents of a request, and one for each document when it is done. The
second may come from another process than the first; the job's id joins them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime

from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.request_context import current
from ragkv.api.runtime.tenants import Tenant
from ragkv.errors import ConfigError
from ragkv.ingest.job_table import owner_of
from ragkv.ingest.jobs import DocumentOutcome

AUDIT_LOGGER = "ragkv.audit"

logger = logging.getLogger(AUDIT_LOGGER)


class AuditLog:
    """Writes the events. Thread-safe."""

    def __init__(self, path: str = ""):
        """Take the file; "": the log alone.

        Raises:
            ConfigError: Nothing can be appended to the file.
        """
        self._path = path
        try:
            self._append(b"")
        except OSError as error:
            raise ConfigError(f"RAGKV_AUDIT_LOG: cannot append to {path} ({error.strerror})") from None

    def record(
        self,
        caller: Caller,
        action: str,
        result: str,
        documents: Sequence[str] = (),
        collection: str = "",
        job_id: str = "",
    ) -> None:
        """Record what a caller did.

        Args:
            caller: Who did it.
            action: `ingest`, `delete`, `delete_collection` or `cancel`.
            result: What came of it.
            documents: Ids of the documents.
            collection: Name of their collection in the catalogue; "" where it is not known.
            job_id: Id of the job; "" if there is none.
        """
        moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event = {
            "tenant": caller.tenant.name,
            "subject": caller.subject,
            "action": action,
            "documents": list(documents),
            "collection": caller.tenant.outside(collection),
            "result": result,
            "job_id": job_id,
        }
        logger.info("audit", extra=event)
        line = json.dumps({"time": moment, **event, "request_id": current().id}) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            logger.error("the audit file cannot be written; only the log has this event", exc_info=error)

    def record_outcome(self, outcome: DocumentOutcome) -> None:
        """Record what came of a document of a job."""
        caller = Caller(Tenant(owner_of(outcome.collection)), outcome.subject)
        action = "replace" if outcome.result == "replaced" else "ingest"
        self.record(caller, action, outcome.result, [outcome.document_id], outcome.collection, outcome.job_id)

    def _append(self, line: bytes) -> None:
        if not self._path:
            return
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while line:
                line = line[os.write(file, line) :]
        finally:
            os.close(file)
