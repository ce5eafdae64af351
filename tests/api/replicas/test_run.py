"""`ragkv serve --replicas` before Ray is started: what it refuses, and what it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ragkv.api.replicas.settings import check_settings
from ragkv.config import load_settings
from ragkv.errors import ConfigError
from tests.forked import run_forked

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from ragkv.cli import run
sys.exit(run(["serve", "--replicas", "2", "--port", "0"]))
"""


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    done = run_forked(["-c", WITHOUT_RAY], tmp_path, os.environ, timeout=100)
    assert done.returncode == 2
    assert (
        done.stderr
        == "ragkv: --replicas needs ray, which is not installed: pip install 'ray[serve,data]>=2.60,<2.61'\n"
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"replicas": "3-2"}, "replicas: .*3-2 has more replicas before the hyphen than behind it"),
        ({"replicas": 2, "device": "cuda:1"}, "every replica has a GPU of its own"),
        ({"replicas": 2, "device": "spread"}, "every replica has a GPU of its own"),
    ],
)
def test_settings_that_allow_no_replicas_are_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_settings(load_settings(**given))


@pytest.mark.parametrize(
    ("given", "counts"),
    [("0", (0, 0)), ("2", (2, 2)), (2, (2, 2)), ("2-8", (2, 8)), ("0-4", (1, 4)), ("0-0", (0, 0))],
)
def test_replicas_are_a_number_or_the_fewest_and_the_most(given: object, counts: tuple[int, int]) -> None:
    assert load_settings(replicas=given).replica_counts == counts
