"""Ten thousand requests of all kinds come and go: nothing leaks, and every answer is that of the request alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.runtime.test_mixed_requests import check_mixed_requests, recalled_drafts  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("one_thread", "recalled_drafts")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("paged", [False, True])
def test_10000_requests_that_join_leave_and_are_cancelled_leak_nothing(tmp_path: Path, paged: bool) -> None:
    check_mixed_requests(tmp_path, 10_000, 400, paged)
