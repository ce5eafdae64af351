"""LMCache's benchmark of answers, a client that was not written for this service, runs against it and scores it.

It is no dependency. It runs from a folder, without being built and without what its server needs:

    pip install --no-deps --target build/lmcache lmcache==0.5.6 prometheus_client
    LMCACHE=build/lmcache python -m pytest -m soak -s tests/soak/test_lmcache.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragkv.config import bundled_models
from tests.soak.test_concurrency import service

BARE = Path(__file__).with_name("bare_lmcache.py")
NATURAL = Path(__file__).resolve().parents[2] / "ragkv" / "bench" / "data" / "natural"
QUESTIONS = 12
FULL = "tiny:full"


@pytest.fixture(scope="module")
def paths() -> str:
    """Where Python finds LMCache."""
    given = os.environ.get("LMCACHE", "")
    if given:
        return str(Path(given).resolve())
    if importlib.util.find_spec("lmcache") is None:
        pytest.skip("LMCACHE names no folder with lmcache in it; see the docstring of this file")
    return ""


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (NATURAL / name).read_text().splitlines()]


def scored(folder: Path, paths: str, url: str, model: str, program: list[str]) -> dict[str, Any]:
    """What LMCache says about a model; the folder holds its questions, and the model's tokenizer under its name."""
    command = [*program, "bench", "engine", "--engine-url", url, "--model", model, "--workload", "rag-qa-quality"]
    command += ["--rag-dataset", "questions.json", "--rag-num-samples", str(QUESTIONS), "--rag-max-output-length", "24"]
    command += ["--rag-doc-align-tokens", "16", "--tokens-per-gb-kvcache", "1000", "--no-interactive", "-q"]
    command += ["--json", "--rag-output", "scores.json"]
    quiet = {"LMCACHE_DISABLE_BANNER": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads((folder / "scores.json").read_text())
    requests = json.loads((folder / "bench_summary.json").read_text())["results"]
    shown = {name: requests[name] for name in ("successful_requests", "p50_ttft_ms", "p99_ttft_ms")}
    print(f"\n{model}, {Path(program[-1]).name}: {told['summary']} {shown}")  # seen with -s
    assert (requests["successful_requests"], requests["failed_requests"]) == (QUESTIONS, 0)
    return told


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_lmcaches_benchmark_runs_and_scores_the_answers(tmp_path: Path, paths: str) -> None:
    documents = {each["id"]: each for each in lines("documents-1.jsonl")}
    asked = [each for each in lines("questions-1.jsonl") if each["kind"] == "one"][:QUESTIONS]
    for name in ("tiny", FULL):
        (tmp_path / name).symlink_to(bundled_models() / "tiny")
    samples = [
        {
            "id": str(number),
            "question": each["q"],
            "answers": each["a"],
            "contexts": [
                {"title": documents[name]["title"], "text": "\n\n".join(documents[name]["pieces"])}
                for name in each["documents"]
            ],
        }
        for number, each in enumerate(asked)
    ]
    (tmp_path / "questions.json").write_text(json.dumps(samples))
    sent = [
        {"id": each["id"], "title": each["title"], "text": "\n\n".join(each["pieces"])} for each in documents.values()
    ]
    with service(tmp_path) as (_, url):
        filled = httpx.post(f"{url}/v1/documents?wait=true", json={"documents": sent}, timeout=600).json()
        assert filled["status"] == "completed", filled
        own = [sys.executable, "-m", "lmcache.cli.main"]
        as_it_is = scored(tmp_path, paths, url, "tiny", own)
        bare = [sys.executable, str(BARE)]
        reused, full = scored(tmp_path, paths, url, "tiny", bare), scored(tmp_path, paths, url, FULL, bare)
    # The bundled model puts nothing between the tags that LMCache asks for, so none of its answers is read there.
    assert len(as_it_is["per_sample"]) == QUESTIONS
    assert all(each["num_output_tokens"] >= 1 and each["ttft"] > 0 for each in as_it_is["per_sample"])
    for told in (reused, full):
        assert told["summary"]["parse_rate"] == 1.0
        assert told["summary"]["f1_mean"] > 0.4
