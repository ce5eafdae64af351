"""Five thousand hostile requests: other ones in every run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.api.fuzz.run import fuzz
from tests.api.fuzz.test_fuzz import check_seen

CASES = 5_000


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_5000_hostile_requests_stop_nothing(tmp_path: Path) -> None:
    chance = random.SystemRandom().randrange(2**32)
    print(f"\nseed {chance}")
    check_seen(fuzz(tmp_path, CASES, restarts=10, chance=chance), CASES)
