"""What `ragkv ingest` says before it begins, while it runs, and at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ragkv.cli.ingest_output import BYTES_PER_TOKEN, IngestMeter, Workload, describe_bytes, forecast, kv_bytes
from ragkv.engine.engine import Engine
from ragkv.model.decoder import DecoderModel
from ragkv.types import Document

TEXT = "The harbour of Tarn was built in 1889 by Ada Brook. " * 400


def document(name: str, text: str) -> Document:
    return Document(id=name, title="", text=text, source=name)


def engine(model: DecoderModel, store: str = "disk", body: str = "exact") -> Engine:
    return cast("Engine", SimpleNamespace(model=model, settings=SimpleNamespace(store=store, store_body=body)))


def test_files_are_counted_without_those_that_are_not_read(tmp_path: Path) -> None:
    for name, text in (("a.md", "four"), ("b.txt", "twelve bytes"), ("c.pdf", "of unknown text"), ("d.exe", "skipped")):
        (tmp_path / name).write_text(text)
    assert Workload.of([tmp_path]) == Workload(files=3, text_bytes=16, others=1)
    assert Workload.of([tmp_path / "a.md", tmp_path / "b.txt"]) == Workload(files=2, text_bytes=16)


def test_the_line_names_the_file_of_how_many_the_rate_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("ragkv.cli.ingest_output.time", SimpleNamespace(monotonic=lambda: now[0]))
    meter = IngestMeter(Workload(files=3, text_bytes=300))
    meter.opened(document("a", "x" * 100))
    assert meter.line("encode", 0, 2) == "file 1 of 3 · encode 0 of 2", "no rate before anything is read"
    now[0] += 60
    meter.ended(document("a", "x" * 100), tokens=1200)
    meter.opened(document("b", "x" * 200))
    assert meter.line("encode", 1, 4) == "file 2 of 3 · encode 1 of 4 · 20 tokens/s · 2 min left"


def test_a_file_of_many_documents_is_one_file() -> None:
    meter = IngestMeter(Workload(files=1, text_bytes=10))
    for name in ("1", "2"):
        meter.opened(Document(id=name, title="", text="x", source="lines.jsonl"))
    assert meter.line("split", 0, 1).startswith("file 1 of 1 · ")


def test_a_large_ingest_says_what_it_will_store_and_what_needs_less(model: DecoderModel) -> None:
    per_token = kv_bytes(engine(model), 16) / 16
    tokens = int(3.2e9 / per_token)
    workload = Workload(files=12, text_bytes=int(tokens * BYTES_PER_TOKEN))
    told = forecast(engine(model), workload)
    assert told is not None
    assert told.startswith("12 files, about ")
    assert told.endswith(": about 3.2 GB of KV on the disk; RAGKV_STORE_BODY=int8 needs less")
    small = forecast(engine(model, "redis://x", "int8"), workload)
    assert small is not None
    assert small.endswith(" MB of KV in the store"), "float32 in one byte a number is a quarter"
    mixed = forecast(engine(model, "redis://x", "int8"), Workload(12, workload.text_bytes, others=4))
    assert mixed == f"{small}, beside that of 4 files of other formats"
    assert forecast(engine(model), Workload(files=12, text_bytes=1000)) is None, "little is not worth a line"


@pytest.mark.parametrize(("count", "told"), [(999_999, "1 MB"), (307e6, "307 MB"), (3.21e9, "3.2 GB")])
def test_bytes_are_told_as_disks_are_sold(count: float, told: str) -> None:
    assert describe_bytes(int(count)) == told


def ingesting(tmp_path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ragkv.cli", "ingest", str(tmp_path / "in"), "--data", str(tmp_path / "d")]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}, **pipes)


def test_an_interrupted_ingest_says_how_to_go_on_and_the_next_one_does(tmp_path: Path, interruptible: None) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.md").write_text("# Tarn\n\nThe harbour was built in 1889.")
    (tmp_path / "in" / "b.md").write_text("# Mell\n\n" + TEXT)
    (tmp_path / "in" / "c.md").write_text("# Orrin\n\nThe mill was sold in 1902.")
    with ingesting(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith("added "), "the first document is there"
        first.send_signal(signal.SIGINT)
        _, told = first.communicate(timeout=60)
    assert first.returncode == 130
    assert told.splitlines()[-1] == "ragkv: stopped; what was read is kept. Run the same command again to go on"
    with ingesting(tmp_path) as second:
        done, told = second.communicate(timeout=200)
    assert second.returncode == 0
    assert done.splitlines()[0].startswith("unchanged ")
    assert " tokens, " in told
    assert " a second; their KV: " in told
