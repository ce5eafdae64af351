"""Requests of all kinds come and go: nothing leaks, and every answer is that of the request alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest

from ragkv.engine import speculation
from ragkv.engine.drafting import Drafter, DraftParams
from tests.api.runtime.mixed_requests import RUNNING, Drive, open_small

pytestmark = pytest.mark.usefixtures("one_thread", "recalled_drafts")


Said = dict[tuple[int, ...], Sequence[int]]


class RecallingDrafter(Drafter):
    """Drafts what the latest answer to the same question said, too: random answers quote nothing."""

    def __init__(
        self, texts: Sequence[Sequence[int]], never: Iterable[int], said: dict[tuple[int, ...], Sequence[int]]
    ):
        """Draft with short n-grams. said: the latest answers by question."""
        self._asked, self._said = tuple(texts[-1]), said
        params = DraftParams(longest=2, shortest=1, first=4)
        super().__init__([*texts, said.get(self._asked, ())], never, params)

    def propose(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """Draft, and remember the answer so far."""
        self._said[self._asked] = list(tokens)
        return super().propose(tokens, limit)


@pytest.fixture
def recalled_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft from earlier answers."""
    monkeypatch.setattr(speculation, "Drafter", partial(RecallingDrafter, said={}))


def check_mixed_requests(folder: Path, requests: int, window: int, paged: bool) -> None:
    """Run so many requests; check that they met what they should meet."""
    with open_small(folder / "together", paged) as engine, open_small(folder / "alone") as alone:
        drive = Drive(engine, alone)
        drive.run(requests, window)
    counts = drive.counts
    print(f"\n{dict(counts)}, tensors and bytes alive {drive.memory}")  # seen with -s
    assert counts["answered"] + counts["left"] == requests
    assert counts["left"] > requests / 20
    assert counts["most together"] > RUNNING / 2
    assert counts["most slots"] > 0
    kinds = ("in the pool", "in place", "turns") if paged else ("in the pool", "with drafts", "turns")
    assert min(counts[f"compared {kind}"] for kind in kinds) > 0
    tensors, size = zip(*drive.memory[2:], strict=True)  # until then some branches are met for the first time
    assert max(tensors) == tensors[0], "nothing is left of a request"
    assert max(size) <= 1.25 * min(size), "tables of the pool are as long as the longest of the latest contexts"


@pytest.mark.parametrize("paged", [False, True])
def test_requests_that_join_leave_and_are_cancelled_leak_nothing(tmp_path: Path, paged: bool) -> None:
    check_mixed_requests(tmp_path, 160, 40, paged)
