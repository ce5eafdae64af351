"""The rows of the table of documents, and what it can be filtered by: folders and tags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ragkv.api.dashboard.formatting import NONE, count, duration, size
from ragkv.api.runtime.kv_estimates import KVSizes
from ragkv.api.runtime.tenants import Tenant
from ragkv.catalog import DocumentInfo
from ragkv.ingest.jobs import IngestJob

UNFINISHED = 100
"""Most documents that are listed because they wait or have failed."""
CHOICES = 60
"""Most folders, and most tags, that are offered."""
SHOWN_TAGS = 4
"""Tags that a row shows."""
_TAG = 40
"""Characters of a tag."""
_STATE_OF = {"queued": "waiting", "running": "waiting", "failed": "failed"}
Tag = tuple[str, str | int | float | bool]
"""A key of the metadata and one of its values."""


@dataclass(frozen=True)
class Pending:
    """A document that is not stored, or whose newest version is not.

    Attributes:
        id: Its id, or the name of a file that could not be read.
        state: `waiting` or `failed`.
        reason: Why it failed.
    """

    id: str
    state: str
    reason: str


def find_pending(jobs: list[IngestJob], get: Callable[[str], IngestJob]) -> list[Pending]:
    """Return the documents that wait or have failed.

    Only the newest job of a document counts: an upload that succeeds replaces one that failed.

    Args:
        jobs: Jobs of one collection, newest first.
        get: Returns a job with all its documents.
    """
    open_ended = [at for at, job in enumerate(jobs) if job.finished is None or job.counts.failed]
    found: dict[str, Pending | None] = {}
    for job in jobs[: max(open_ended, default=-1) + 1]:
        for entry in get(job.id).documents:
            state, reason = _STATE_OF.get(entry.status), entry.error.message if entry.error else ""
            found.setdefault(entry.id, Pending(entry.id, state, reason) if state else None)
    return [each for each in found.values() if each is not None][:UNFINISHED]


def matches(text: str, words: str) -> bool:
    """Whether a text has each of these words, in any case."""
    return all(word in text.casefold() for word in words.casefold().split())


def folder_of(document_id: str) -> str:
    """Return the folder of a file by the document's id, which is its path; "" for none."""
    folder, slash, _ = document_id.rpartition("/")
    return folder + slash


def folders_of(infos: Iterable[DocumentInfo]) -> dict[str, int]:
    """Return the folders of these documents and those above them, each with the number of documents below it."""
    found: Counter[str] = Counter()
    for info in infos:
        folder = folder_of(info.id)
        while folder:
            found[folder] += 1
            folder = folder_of(folder.rstrip("/"))
    return dict(sorted(found.most_common(CHOICES)))


def tags_of(metadata: Mapping[str, Any]) -> list[Tag]:
    """Return the tags of a document: its metadata, one for each value that can be filtered by."""
    listed = ((key, value if isinstance(value, list) else [value]) for key, value in metadata.items())
    return [(key, each) for key, values in listed for each in values if isinstance(each, str | int | float | bool)]


def common_tags(infos: Iterable[DocumentInfo]) -> list[Tag]:
    """Return the tags of these documents, the most frequent ones, sorted."""
    found = Counter(tag for info in infos for tag in tags_of(info.metadata))
    return sorted((tag for tag, _ in found.most_common(CHOICES)), key=describe_tag)


def describe_tag(tag: Tag) -> str:
    """Return a tag as text."""
    text = f"{tag[0]}: {tag[1]}"
    return text if len(text) <= _TAG else text[: _TAG - 1] + "…"


def document_row(info: DocumentInfo, sizes: KVSizes, saves: float | None) -> dict[str, Any]:
    """Return the row of a stored document.

    Args:
        info: The document.
        sizes: Bytes of its KV.
        saves: Seconds that one question over it saves; None if that is not known.
    """
    return {
        "id": info.id,
        "title": info.title or info.id,
        "status": "ready",
        "stored": True,
        "tags": [describe_tag(tag) for tag in tags_of(info.metadata)[:SHOWN_TAGS]],
        "chunks": count(info.chunks),
        "tokens": count(info.tokens),
        "bytes": size(info.bytes),
        "kv": f"{size(sizes.computed)} → {size(sizes.stored)}",
        "saves": NONE if saves is None else f"≈ {duration(saves)}",
        "updated": info.updated,
    }


def pending_row(pending: Pending, tenant: Tenant) -> dict[str, Any]:
    """Return the row of a document that is not stored."""
    return {
        "id": pending.id,
        "title": pending.id,
        "status": pending.state,
        "reason": tenant.told(pending.reason),
        "stored": False,
    }
