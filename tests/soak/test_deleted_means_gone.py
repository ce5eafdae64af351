"""Ten minutes of askers, writers, bad and cancelled requests: what was deleted stays gone, the service stops growing.

SOAK_SECONDS in the environment makes it shorter or longer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.api.test_deleted_means_gone import check_deleted_means_gone, figures

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
MEMORY = 48.0
"""MiB by which the service may grow in the second half: its memory for KV and for conversations may still fill up."""
FEW = 8
"""Descriptors and threads that may come and go with the requests of one moment."""
DEADLINE = 60.0


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_nothing_of_a_deleted_document_is_in_any_response_for_ten_minutes(tmp_path: Path) -> None:
    world = check_deleted_means_gone(tmp_path, SECONDS, new_interpreter=True)
    found = figures(world)
    print(json.dumps(found, indent=1))  # seen with -s
    counts, early, half, late = world.counts, found["a fifth in"], found["half way"], found["at the end"]
    assert min(counts[each] for each in ("added", "replaced", "deleted", "hung up", "bad 422", "turns told of")) >= 1
    assert found["p99"] < DEADLINE
    assert late["memory"] - half["memory"] < MEMORY, found
    assert late["descriptors"] <= early["descriptors"] + FEW, found
    assert late["threads"] <= early["threads"] + FEW, found
