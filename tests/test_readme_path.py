"""The first commands under "Use it" in the README: each one runs as it stands, in order, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.redis_server import free_port

ANSWER = "Ada Brook"


def commands(readme: str) -> list[str]:
    """The lines of the first block of the section."""
    section = readme.partition("\n## Use it\n")[2]
    block = re.search(r"\n\n((?:    .+\n)+)", section)
    assert block
    return [line.strip() for line in block[1].splitlines()]


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A folder with nothing but the program where `make demo` puts it."""
    program = tmp_path / ".venv" / "bin" / "ragkv"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{root}" exec "{sys.executable}" -m ragkv.cli "$@"\n')
    program.chmod(0o755)
    return tmp_path


def ran(command: str, folder: Path) -> str:
    """What a command that must succeed prints."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


@contextmanager
def serving(command: str, folder: Path, port: int) -> Iterator[None]:
    given = {**os.environ, "RAGKV_PORT": str(port)}
    words = ["bash", "-c", f"exec {command}"]
    with subprocess.Popen(words, cwd=folder, env=given, stderr=subprocess.PIPE, text=True) as process:
        try:
            while "serving at" not in (line := process.stderr.readline()):
                assert line, "the service ended before it served"
            yield
        finally:
            process.kill()


@pytest.mark.timeout(240)
def test_the_newcomers_commands_run_as_they_stand(root: Path, checkout: Path) -> None:
    make, ingest, ask, why, serve, curl = commands((root / "README.md").read_text())
    ran(make, checkout)
    assert "tarn.md" in ran(ingest, checkout)
    assert ANSWER in ran(ask, checkout)
    told = json.loads(ran(why, checkout))
    assert told["answer"] == ANSWER
    assert told["report"]["cache"]["chunks"] == 1
    assert {"tokens", "ratios", "cache", "timings_ms"} <= told["report"].keys()
    assert shutil.which("curl"), "this test needs curl"
    port = free_port()
    with serving(serve, checkout, port):
        answer = json.loads(ran(curl.replace(":8000", f":{port}"), checkout))
    assert answer["answer"] == ANSWER
    assert answer["citations"][0]["document_id"] == told["citations"][0]["document_id"]
