"""The list of components is cut to what an installed ragkv needs."""

from __future__ import annotations

from typing import Any

import pytest

from tools.sbom import cut, required


def test_what_is_required_is_followed_through_all_packages_and_extras() -> None:
    names = required(["uvicorn", "redis>=8"])
    assert {"uvicorn", "h11", "click", "redis"} <= names
    assert not names & {"pytest", "torch", "hiredis"}
    assert "cryptography" in required(["pyjwt[crypto]"])
    assert "cryptography" not in required(["pyjwt"])


def test_a_marker_that_does_not_hold_excludes_a_package() -> None:
    assert required(["uvicorn; sys_platform == 'nowhere'"]) == set()


def test_packages_of_developers_are_left_out_and_the_version_is_set() -> None:
    bom: dict[str, Any] = {
        "metadata": {"component": {"bom-ref": "root", "name": "ragkv"}},
        "components": [
            {"bom-ref": "a", "name": "uvicorn"},
            {"bom-ref": "b", "name": "H11"},
            {"bom-ref": "c", "name": "pytest"},
        ],
        "dependencies": [
            {"ref": "root", "dependsOn": ["a", "c"]},
            {"ref": "a", "dependsOn": ["b", "c"]},
            {"ref": "c", "dependsOn": []},
        ],
    }
    made = cut(bom, ["uvicorn"], "1.2.3")
    assert [each["name"] for each in made["components"]] == ["uvicorn", "H11"]
    assert made["dependencies"] == [{"ref": "a", "dependsOn": ["b"]}, {"ref": "root", "dependsOn": ["a"]}]
    assert made["metadata"]["component"]["version"] == "1.2.3"
    assert made["metadata"]["component"]["purl"] == "pkg:pypi/ragkv@1.2.3"


def test_a_package_that_is_not_installed_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError):
        required(["no-such-package-of-anybody"])
