"""A document in a job: as it is written down, and the fault that it failed with."""

from __future__ import annotations

import json
import logging
import re
from base64 import b64encode

from ragkv.catalog.limits import MAX_NAME
from ragkv.errors import InputError, OutOfMemory, RagkvError, is_out_of_memory
from ragkv.ingest.document_ids import Rejected
from ragkv.ingest.job_view import JobFault
from ragkv.ingest.loader import checked
from ragkv.types import Document

logger = logging.getLogger(__name__)


def fault_of(error: BaseException, document_id: str, job_id: str) -> JobFault:
    """Return the fault to record. An unexpected error goes to the log; the fault does not show its message."""
    if is_out_of_memory(error):
        logger.warning("document %r of job %s: %s", document_id, job_id, OutOfMemory())
        return JobFault(code_of(OutOfMemory), str(OutOfMemory()))
    if isinstance(error, RagkvError):
        if error.public != error.message:
            logger.error("document %r of job %s: %s", document_id, job_id, error)
        return JobFault(code_of(type(error)), error.public)
    logger.error("document %r of job %s", document_id, job_id, exc_info=error)
    return JobFault("internal_error", f"{type(error).__name__} while reading the document; see the log")


def entry_of(item: Document | Rejected, limit: int) -> dict[str, str | None]:
    """Return the table row of a submitted document."""
    row: dict[str, str | None] = {"status": "queued", "code": None, "message": None, "payload": None}
    try:
        if isinstance(item, Rejected):
            raise item.error
        item = checked(item, limit)
    except InputError as error:
        name = item.source if isinstance(item, Rejected) else item.id
        return {
            **row,
            "id": storable(name),
            "status": "failed",
            "code": code_of(type(error)),
            "message": storable(error.public),
        }
    more: list[object] = [item.pages, item.source, b64encode(item.file).decode()]
    while more and not more[-1]:
        more.pop()
    return {**row, "id": item.id, "payload": json.dumps([item.title, item.text, dict(item.metadata), *more])}


def code_of(kind: type[Exception]) -> str:
    """Name a kind of error as `JobFault.code` does, in snake case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def storable(name: str) -> str:
    """Escape and shorten a text so that the table can hold it, whatever a file was called."""
    return name.encode(errors="backslashreplace").decode()[: 4 * MAX_NAME]
