"""What `make lock` writes: which Pythons and machines it is for, and what is needed there."""

from __future__ import annotations

import pytest
from packaging.tags import parse_tag

from tools import lock


@pytest.mark.parametrize(
    ("tag", "minors"),
    [
        ("py3-none-any", {"3.11", "3.12", "3.13"}),
        ("cp312-cp312-manylinux_2_28_aarch64", {"3.12"}),
        ("cp39-abi3-manylinux_2_17_x86_64", {"3.11", "3.12", "3.13"}),
        ("cp310-cp310-manylinux_2_28_x86_64", set()),
        ("cp313-cp313t-manylinux_2_28_x86_64", set()),
        ("cp312-cp312-musllinux_1_2_x86_64", set()),
        ("cp312-cp312-macosx_14_0_arm64", set()),
        ("cp312-cp312-win_amd64", set()),
    ],
)
def test_wheels_are_listed_that_a_supported_python_on_linux_can_install(tag: str, minors: set[str]) -> None:
    assert {minor for minor, own in lock.supported_tags().items() if parse_tag(tag) & own} == minors


def test_a_closure_follows_extras_and_the_markers_of_the_environment() -> None:
    needs: dict[str, list[str]] = {
        "one": ["two[more]>=1", "old; python_version < '3.12'"],
        "two": ["three; extra == 'more'"],
        "three": [],
        "old": [],
    }
    older, *_, newer = (environment for _, environment in lock.environments())
    assert lock.closure(["one"], needs, older) == {"one", "two", "three", "old"}
    assert lock.closure(["One"], needs, newer) == {"one", "two", "three"}
    with pytest.raises(ValueError, match="one needs old"):
        lock.closure(["one"], {name: lines for name, lines in needs.items() if name != "old"}, older)


def test_a_package_that_only_some_pythons_need_has_a_marker() -> None:
    assert lock.marker(["3.11", "3.12", "3.13"]) == ""
    assert lock.marker(["3.12", "3.11"]) == 'python_version in "3.11 3.12"'
