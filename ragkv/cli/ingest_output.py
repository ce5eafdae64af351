"""What `ragkv ingest` says: what it will take, how far it is, what became of each document, and the sums."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ragkv.cli.common import err, fail, out, printable, progress, tell
from ragkv.errors import InputError

if TYPE_CHECKING:
    from ragkv.engine.engine import Engine
    from ragkv.ingest.document_ids import Rejected
    from ragkv.types import Document

BYTES_PER_TOKEN = 3.5
"""Of text, in the mean. What is said before an ingest is an estimate; the sums at the end are counted."""
NOTICED = 256 * 2**20
"""Bytes of KV from which on an ingest says before it begins how much it will store."""
TEXTS = (".txt", ".md", ".csv", ".jsonl", ".html", ".htm", ".xhtml")
"""Files whose size tells how much text is in them."""


@dataclass(frozen=True)
class Workload:
    """What an ingest will read.

    Attributes:
        files: Files of this machine.
        text_bytes: Bytes of those whose size tells how much text is in them.
        others: How many files tell nothing by their size: PDFs and office files.
    """

    files: int = 0
    text_bytes: int = 0
    others: int = 0

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Workload:
        """Count the files, folders walked, without opening one."""
        from ragkv.ingest.folders import named

        files = [path for path, _ in named(paths) if path.is_file()]  # what is not there is told when it is read
        texts = [path for path in files if path.suffix.lower() in TEXTS]
        return cls(len(files), sum(path.stat().st_size for path in texts), len(files) - len(texts))


class IngestMeter:
    """How far an ingest is.

    Attributes:
        tokens: Tokens of the documents that were read so far, without those that were there already.
    """

    def __init__(self, workload: Workload):
        """Start the clock."""
        self._workload, self._started, self.tokens = workload, time.monotonic(), 0
        self._seen, self._ended, self._bytes = set[str](), 0, 0

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._started

    def opened(self, document: Document) -> None:
        """Note that a document is read next."""
        self._seen.add(document.source or document.id)

    def ended(self, document: Document, tokens: int) -> None:
        """Note that a document is done. tokens: those that it took."""
        self._ended += 1
        self._bytes += len(document.text.encode())
        self.tokens += tokens

    def line(self, stage: str, done: int, total: int) -> str:
        """Say where the ingest is: the file of how many, the stage, tokens a second, and the time left."""
        files = max(self._workload.files, len(self._seen))
        parts = [f"file {len(self._seen)} of {files}", f"{stage} {done} of {total}"]
        if self.tokens:
            parts.append(f"{self.tokens / self.seconds:,.0f} tokens/s")
        if self._bytes and self._bytes < self._workload.text_bytes:
            parts.append(f"{_duration(self.seconds * (self._workload.text_bytes / self._bytes - 1))} left")
        return " · ".join(parts)


class IngestOutput:
    """What an ingest prints: a line for each document on stdout, and the sums on stderr at the end.

    As JSON it is an object for each document, refused ones included, and at last one with the sums.
    """

    def __init__(self, as_json: bool = False):
        """Choose the form."""
        self._json, self._console = as_json, out()
        self.meter = IngestMeter(Workload())
        self._console.file = self._file = sys.stdout  # `ingest_bulk` puts standard error in its place
        self._counts: Counter[str] = Counter()

    def show(self, document_id: str, status: str, chunks: int, tokens: int, warnings: Sequence[str] = ()) -> None:
        """Print what became of a document, and what its reader warns of."""
        self._counts[status] += 1
        for warning in warnings:
            fail(f"{document_id}: {warning}", 0)
        if self._json:
            done = {"document_id": document_id, "status": status, "chunks": chunks, "tokens": tokens}
            self._print(done | ({"warnings": list(warnings)} if warnings else {}))
        else:
            size = f"{chunks} chunk{'s' * (chunks != 1)}, {tokens} tokens"
            self._console.print(f"{status:<9}  {printable(document_id)}  ({size})")

    def refuse(self, error: Exception | str, document_id: str = "") -> None:
        """Print why a document is refused."""
        self._counts["failed"] += 1
        fail(error, 1)
        if self._json:
            self._print({"document_id": document_id or None, "status": "failed", "error": str(error)})

    def end(self, workers: int, encoded: int) -> int:
        """Print the sums. Returns the exit code.

        Args:
            workers: Processes that encoded.
            encoded: Chunks that they encoded. Those that the store had already do not count.
        """
        if self._json:
            sums = {status: self._counts[status] for status in ("added", "replaced", "unchanged", "failed")}
            seconds = round(self.meter.seconds, 3)
            self._print({**sums, "encoded_chunks": encoded, "workers": workers, "seconds": seconds})
        err().print(", ".join(f"{count} {status}" for status, count in self._sorted()), style="dim")
        return 1 if self._counts["failed"] else 0

    @property
    def done(self) -> int:
        """Documents so far."""
        return self._counts.total()

    def _sorted(self) -> list[tuple[str, int]]:
        return sorted(self._counts.items(), key=lambda each: (each[0] == "failed", each[0]))

    def _print(self, content: dict[str, Any]) -> None:
        typer.echo(json.dumps(content, ensure_ascii=False), file=self._file)


def ingest_all_items(
    engine: Engine, items: Iterable[Document | Rejected], output: IngestOutput, workload: Workload = Workload()
) -> int:
    """Ingest in order. A bad document is reported and the others continue.

    Args:
        engine: Reads them.
        items: The documents, and those that could not be read.
        output: Prints what became of them.
        workload: What they are expected to be, for the forecast and the time that is left.

    Returns:
        The exit code.
    """
    from ragkv.ingest.groups import ingest_all

    before, meter = engine.chunks.encoded, IngestMeter(workload)
    output.meter = meter
    if (told := forecast(engine, workload)) is not None:
        tell(told)
    try:
        with progress() as report:

            def show_progress(stage: str, done: int, total: int) -> None:
                report(meter.line(stage, done, total), done, total)

            for document, outcome in ingest_all(engine, _documents(items, output), show_progress):
                if isinstance(outcome, InputError):
                    meter.ended(document, 0)
                    output.refuse(outcome, document.id)
                else:
                    meter.ended(document, 0 if outcome.status == "unchanged" else outcome.tokens)
                    warnings = reader_warnings(document.metadata)
                    output.show(document.id, outcome.status, outcome.chunks, outcome.tokens, warnings)
    except KeyboardInterrupt:
        tell("stopped; what was read is kept. Run the same command again to go on")
        raise
    engine.retriever.views.save()
    code = output.end(1, engine.chunks.encoded - before)
    if meter.tokens:
        size = describe_bytes(kv_bytes(engine, meter.tokens))
        rate = f"{meter.tokens / meter.seconds:,.0f} a second"
        err().print(f"{meter.tokens:,} tokens, {rate}; their KV: {size}", style="dim")
    return code


def forecast(engine: Engine, workload: Workload) -> str | None:
    """Say what an ingest will store, where that is much; None where it is not."""
    tokens = int(workload.text_bytes / BYTES_PER_TOKEN)
    size = kv_bytes(engine, tokens)
    if size < NOTICED:
        return None
    where = "on the disk" if engine.settings.store == "disk" else "in the store"
    files = _files(workload.files)
    told = f"{files}, about {tokens:,} tokens: about {describe_bytes(size)} of KV {where}"
    if workload.others:
        told = f"{told}, beside that of {_files(workload.others)} of other formats"
    return told if engine.settings.store_body != "exact" else f"{told}; RAGKV_STORE_BODY=int8 needs less"


def _files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


def kv_bytes(engine: Engine, tokens: int) -> int:
    """Return the bytes of KV that so many tokens have in the store, without digests."""
    from ragkv.store.format.layout import Layout

    model = engine.model
    return Layout(model.shape, tokens, model.profile.block, model.dtype, engine.settings.store_body).body_bytes


def describe_bytes(count: int) -> str:
    """Say a number of bytes in MB or GB of 10^6 and 10^9, as disks are sold."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"


def reader_warnings(metadata: Mapping[str, Any]) -> list[str]:
    """Return what the reader of a file found worth telling, a line each. metadata: of its document."""
    if not metadata.get("format"):  # what a sender calls so is not the reader's
        return []
    encoding = metadata.get("encoding")
    told = [f"read as {encoding}, which it does not say; save it as UTF-8 if letters are wrong"] if encoding else []
    found = metadata.get("warnings")
    return [*told, *map(str, found if isinstance(found, list) else [])]


def _documents(items: Iterable[Document | Rejected], output: IngestOutput) -> Iterator[Document]:
    """Yield the documents. Print why the others are refused."""
    from ragkv.types import Document

    for item in items:
        if isinstance(item, Document):
            output.meter.opened(item)
            yield item
        else:
            output.refuse(item.error)


def _duration(seconds: float) -> str:
    """Say a time in the one unit that matters."""
    if seconds < 90:
        return f"{max(1, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
