"""`ragkv serve` with ten thousand recorded answers of the tenant zeta. Run as a program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ragkv.api.app
from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.cli import main
from ragkv.engine.kv_map import KVMap
from ragkv.passages import Citation, Mark
from ragkv.report import (
    Answer,
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

ANSWERS = 10_000
TENANT = "zeta"
JUDGED = "Was the mill of Orm burnt down in 1901?"
"""A recorded question whose answer is a judgement."""


def fill(engine_thread: EngineThread) -> None:
    """Record the answers."""
    for number in range(ANSWERS):
        report = Report(
            method="scout",
            prefill="dense",
            decode="dense",
            model="tiny",
            tokens=TokenCounts(1000 + number % 7, 200.0, 150.0, 20, 8, 0.0, 170.0),
            ratios=Ratios(0.2, 0.15, 0.28, 1.0),
            cache=CacheReport(6, TierHits(0, 4, 2), 0, ()),
            bytes=ByteCounts(12_000_000, 100_000, 2_000_000),
            prefilling=PrefillReport(None, None, "dense was asked for"),
            decoding=DecodeReport(8, 300.0, 300.0, 0, "stop", "dense was asked for"),
            timings_ms=Timings(9.0, 1.0, 2.0, 3.0, 0.0, 100.0, 120.0 + number % 100, 60.0, 200.0),
            chunks=(),
        )
        answer = Answer(f"Question {number}?", "An answer.", (), report)
        if number == ANSWERS - 5:
            answer = judged(report)
        engine_thread.metrics.answered(report, 600.0, TENANT)
        engine_thread.history.record(
            RecordedAnswer(f"id{number}", TENANT, f"{TENANT}:default", "", answer, KVMap(16, 12, ()), 600.0)
        )


def judged(report: Report) -> Answer:
    """Return an answer `yes` with the sentence that decides."""
    text = "The mill stood on a hill. The mill of Orm was burnt down in 1901. Nobody was hurt."
    start, end = text.index("The mill of"), text.index(" Nobody")
    cited = Citation("mill", "mill#0", "Orm", 0.5, text=text, start=0, marks=(Mark(start, end, start, end),))
    chunk = ChunkReport("mill#0", "mill", "Orm", 20, 1, (1.0,), 0.0)
    return Answer(JUDGED, "yes", (cited,), replace(report, chunks=(chunk,), held=1.0))


def create_app(*given: Any, **named: Any) -> Any:
    """Create the application with the answers."""
    app = _create_app(*given, **named)
    fill(app.state.engine_thread)
    return app


if __name__ == "__main__":
    _create_app, ragkv.api.app.create_app = ragkv.api.app.create_app, create_app
    main()
