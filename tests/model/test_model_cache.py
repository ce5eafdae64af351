"""The cache of converted models: made once, verified when used, made anew when damaged, by several at once."""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ragkv.errors import ConfigError
from ragkv.model import model_cache
from ragkv.model.model_cache import ConvertedModel, converted
from tests import written_gguf
from tests.written_gguf import write_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "a.gguf", written_gguf.weights("llama"), "llama")


@pytest.fixture(scope="module")
def made(source, tmp_path_factory) -> Path:
    """A cache that holds the file."""
    cache = tmp_path_factory.mktemp("made") / "cache"
    converted(source, cache, lambda line: None)
    return cache


@pytest.fixture
def cache(made, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "cache"))


def test_a_file_is_converted_once_and_the_user_is_told(source, tmp_path):
    told: list[str] = []
    first = converted(source, tmp_path / "deep" / "cache", told.append)
    assert [line.split(" in ")[0].split(",")[0] for line in told] == ["converting a.gguf", "converted a.gguf"]
    assert first.folder.name == model_cache.file_hash(source)
    assert {path.name for path in first.folder.parent.iterdir()} == {first.folder.name}
    assert converted(source, tmp_path / "deep" / "cache", told.append) == first
    assert len(told) == 2
    shutil.copy(source, tmp_path / "other-name.gguf")
    assert converted(tmp_path / "other-name.gguf", tmp_path / "deep" / "cache", told.append) == first


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "weights": lambda folder: flip(folder / "model.safetensors"),
    "cut weights": lambda folder: os.truncate(folder / "model.safetensors", 100),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "tokenizer": lambda folder: flip(folder / "tokenizer.json"),
    "config": lambda folder: (folder / "config.json").write_text("{}"),
    "one file more": lambda folder: (folder / "tokenizer.model").write_bytes(b"x"),
    "manifest": lambda folder: (folder / "manifest.json").write_text("{"),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "a list as manifest": lambda folder: (folder / "manifest.json").write_text("[]"),
    "older format": lambda folder: (folder / "manifest.json").write_text(
        json.dumps({**json.loads((folder / "manifest.json").read_text()), "format": 0})
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_folder_is_made_anew(source, cache, what):
    before = converted(source, cache, lambda line: None)
    DAMAGE[what](before.folder)
    told: list[str] = []
    assert converted(source, cache, told.append) == before
    assert "damaged or outdated" in told[0]
    assert [path.name for path in cache.iterdir()] == [before.folder.name]
    assert converted(source, cache, told.append) == before
    assert len(told) == 3


def test_other_files_and_other_metadata_are_other_models(source, cache, tmp_path):
    model = written_gguf.weights("llama")
    other = write_gguf(tmp_path / "b.gguf", model, "llama", metadata={"general.description": "another"})
    first, second = (converted(path, cache, lambda line: None) for path in (source, other))
    assert first.weights_hash != second.weights_hash
    assert (first.folder / "model.safetensors").read_bytes() == (second.folder / "model.safetensors").read_bytes()


def test_several_at_once_make_one_folder(source, tmp_path):
    def convert(_: int) -> ConvertedModel:
        return converted(source, tmp_path / "cache", lambda line: None)

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(convert, range(4)))
    assert len(found) == 1
    assert torch.get_default_dtype() == torch.float32
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [found.pop().folder.name]


def test_a_damaged_folder_is_replaced_by_several_at_once(source, cache):
    before = converted(source, cache, lambda line: None)
    flip(before.folder / "model.safetensors")
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: converted(source, cache, lambda line: None), range(3)))
    assert found == [before] * 3


def test_a_cache_without_room_or_permission_is_refused_with_the_setting(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="RAGKV_MODEL_CACHE") as refusal:
        converted(source, tmp_path / "file" / "cache", lambda line: None)
    assert "\n" not in str(refusal.value)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(model_cache.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"no space left; set RAGKV_MODEL_CACHE to a folder with \d+ MB"):
        converted(source, tmp_path / "cache", lambda line: None)


def test_a_disk_that_fills_up_leaves_nothing(source, tmp_path, monkeypatch):
    def full(source: Path, folder: Path, opened: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_cache, "convert", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        converted(source, tmp_path / "cache", lambda line: None)
    assert not list((tmp_path / "cache").iterdir())


def test_what_a_killed_process_left_is_removed_after_a_day(source, tmp_path):
    cache = tmp_path / "cache"
    for name in (".new-old", ".new-young"):
        (cache / name).mkdir(parents=True)
    past = time.time() - 2 * 24 * 3600
    os.utime(cache / ".new-old", (past, past))
    converted(source, cache, lambda line: None)
    assert {path.name for path in cache.iterdir() if path.name.startswith(".")} == {".new-young"}
