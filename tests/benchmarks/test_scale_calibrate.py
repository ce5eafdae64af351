"""What the simulation predicts from questions that were asked one at a time."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("simpy")

from benchmarks.scale_calibrate import CalibrationRound, ReplayParams, compare, predict
from benchmarks.serve import TimedAnswer
from ragkv.cli import run
from ragkv.cli.samples import samples_folder
from ragkv.report import (
    ByteCounts,
    CacheReport,
    ChunkReport,
    DecodeReport,
    PrefillReport,
    Ratios,
    Report,
    TierHits,
    Timings,
    TokenCounts,
)
from tests.program import SERVE, served
from tests.redis_server import redis_server

WITHIN = 0.2
"""Largest difference between what is predicted and what is measured."""
PARAMS = ReplayParams(passes=3)


def answered(at: float, first: float, tokens: int = 3, chunk: str = "a") -> TimedAnswer:
    """An answer that was alone: the first token came after `first` seconds, and a step takes 10 ms."""
    steps = tokens - 1
    report = Report(
        method="scout",
        prefill="dense",
        decode="dense",
        model="tiny",
        tokens=TokenCounts(100, 100, 0, 10, tokens, 0.0, 10),
        ratios=Ratios(1.0, 0.0, 1.0, 1.0),
        cache=CacheReport(1, TierHits(host=1), 0, ()),
        bytes=ByteCounts(102_400, 400, 102_000),
        prefilling=PrefillReport(None, None, "dense was asked for"),
        decoding=DecodeReport(8, 100.0, 100.0, steps, "stop", ""),
        timings_ms=Timings(
            5.0, 1.0, 0.0, 2.0, 0.0, 1000 * first, 1000 * first, 10.0 * steps, 1000 * first + 10 * steps
        ),
        chunks=(ChunkReport(chunk, "d", "", 100, 1, (1.0,), 0.0),),
    )
    came = tuple(at + first + 0.01 * step for step in range(max(1, steps)))
    return TimedAnswer(at, at, came, came[-1], "", "", report)


def test_questions_far_apart_take_as_long_as_they_took_alone() -> None:
    firsts = [0.1, 0.25, 0.15, 0.4]
    alone = [answered(10.0 * at, first) for at, first in enumerate(firsts)]
    predicted = predict(alone, [10.0 * at for at in range(4)], 1, PARAMS)
    assert sorted(predicted.ttft) == pytest.approx(sorted(firsts), rel=0.05)
    assert predicted.host == 4, "the questions before have filled the host tier"


def test_questions_at_once_wait_for_each_other_and_share_what_a_forward_costs() -> None:
    alone = [answered(0.0, 0.2) for _ in range(4)]
    together = predict(alone, [0.0] * 4, 1, PARAMS)
    assert max(together.ttft) > 0.5
    assert max(together.ttft) < 4 * 0.2
    apart = predict(alone, [0.0] * 4, 4, PARAMS)
    assert max(apart.ttft) == pytest.approx(0.2, rel=0.05)


def test_the_comparison_is_of_all_rounds_together() -> None:
    alone = [answered(float(at), 0.2) for at in range(5)]
    rounds = [
        CalibrationRound(tuple(alone), tuple(alone), predict(alone, [float(at) for at in range(5)], 1, PARAMS))
    ] * 2
    found = {each.name: each for each in compare(rounds)}
    assert found["TTFT p50, s"].measured == pytest.approx(0.2)
    assert all(abs(each.error) < 0.05 for each in found.values()), found


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("services", [1, 2])
def test_the_prediction_of_real_services_is_right_within_a_fifth(tmp_path: Path, services: int) -> None:
    """Services of one thread each, with the same catalogue and Redis, asked in turn at half of what they can do."""
    with ExitStack() as stack:
        store = stack.enter_context(redis_server())
        given = {"RAGKV_STORE": f"{store.url}/0", "RAGKV_DATA": str(tmp_path / "data"), "RAGKV_CHUNK_TOKENS": "256"}
        urls = []
        for number in range(services):
            _, client = stack.enter_context(served(tmp_path, SERVE, **given))
            urls += ["--calibrate", str(client.base_url)]
            for path in sorted(samples_folder().glob("*.md"))[:16] if not number else ():
                client.put(f"/v1/documents/{path.stem}?wait=true", json={"text": path.read_text()}).raise_for_status()
        figures = tmp_path / "figures.json"
        options = ["--host-gib", "0.5", "--rounds", "6", "--top-k", "6", "--json", str(figures)]
        assert run(["bench", "scale", *urls, *options]) == 0
    rows = {row["name"]: row for row in json.loads(figures.read_text())["rows"]}
    print(json.dumps(rows, indent=1))  # seen with -s
    for name in ("answers/s", "TTFT p50, s", "TTFT mean, s", "chunks in host memory"):
        assert abs(rows[name]["error"]) <= WITHIN, rows[name]
    assert np.isfinite(rows["TTFT p99, s"]["error"])
