"""The code under "Use it" in the README: every command runs as it is written, in order, in an empty folder."""

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


def use_it(readme: str) -> str:
    """Return the section "Use it"."""
    return readme.partition("\n## Use it\n")[2].partition("\n## ")[0]


def commands(section: str) -> list[str]:
    """Return the lines of the section's first block."""
    block = re.search(r"(?:^|\n)\n((?:    .+\n)+)", section)
    assert block
    return [line.strip() for line in block[1].splitlines()]


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A folder that holds only the program, where `make demo` puts it."""
    program = tmp_path / ".venv" / "bin" / "ragkv"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{root}" exec "{sys.executable}" -m ragkv.cli "$@"\n')
    program.chmod(0o755)
    return tmp_path


def run(command: str, folder: Path) -> str:
    """Run a command that must succeed and return its output."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


@contextmanager
def serving(command: str, folder: Path, port: int) -> Iterator[None]:
    """Run the service until the block ends."""
    environment = {**os.environ, "RAGKV_PORT": str(port)}
    words = ["bash", "-c", f"exec {command}"]
    with subprocess.Popen(words, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            while "serving at" not in (line := process.stderr.readline()):
                assert line, "the service ended before it served"
            yield
        finally:
            process.kill()


@pytest.mark.timeout(900)
def test_the_newcomers_commands_run_as_they_stand(
    root: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = use_it((root / "README.md").read_text())
    make, ingest, ask, ask_json, serve, curl = commands(section)
    (example,) = re.findall(r"```python\n(.*?)```", section, re.S)
    run(make, checkout)
    assert "tarn.md" in run(ingest, checkout)
    assert ANSWER in run(ask, checkout)
    told = json.loads(run(ask_json, checkout))
    assert told["answer"] == ANSWER
    assert told["report"]["cache"]["chunks"] == 1
    assert {"tokens", "ratios", "cache", "timings_ms"} <= told["report"].keys()
    assert shutil.which("curl"), "this test needs curl"
    port = free_port()
    with serving(serve, checkout, port):
        answer = json.loads(run(curl.replace(":8000", f":{port}"), checkout))
        exec(compile(example.replace(":8000", f":{port}"), "README.md", "exec"), {})
    assert answer["answer"] == ANSWER
    assert answer["citations"][0]["document_id"] == told["citations"][0]["document_id"]
    assert capsys.readouterr().out.startswith(f"{ANSWER} ")
