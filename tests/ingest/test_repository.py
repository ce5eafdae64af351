"""Git repositories: the program git copies them; links, hooks and credentials lead nowhere."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from ragkv.errors import ConfigError, InputError
from ragkv.ingest.loader import Rejected
from ragkv.ingest.repository import Repository, parse_address
from ragkv.ingest.sources import check_locations, load_locations, open_locations
from ragkv.types import Document

LIMIT = 10_000

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def git(folder: Path, *words: str) -> None:
    named = ("-c", "user.name=Ada", "-c", "user.email=ada@tarn.example", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *named, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with documents on two branches, and what should not be read."""
    folder = tmp_path / "yard"
    (folder / "docs").mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "README.md").write_text("# The yard")
    (folder / "docs" / "tarn.md").write_text("The harbour of Tarn.")
    (folder / "docs" / "code.py").write_text("print()")
    (folder / ".github.md").write_text("hidden")
    (tmp_path / "secret.md").write_text("SECRET of this machine")
    (folder / "link.md").symlink_to(tmp_path / "secret.md")
    (folder / "dir").symlink_to(tmp_path)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "Add")
    git(folder, "checkout", "--quiet", "-b", "old/1.0")
    (folder / "docs" / "tarn.md").write_text("The old harbour.")
    git(folder, "commit", "--quiet", "-am", "Change")
    git(folder, "checkout", "--quiet", "main")
    return folder


def texts(address: str) -> dict[str, str]:
    """Texts of the documents at an address, by id."""
    items = list(load_locations([address], LIMIT))
    assert all(isinstance(item, Document) for item in items)
    return {item.id: item.text for item in items if isinstance(item, Document)}


def test_the_documents_of_a_repository_have_its_address_as_id(repository: Path) -> None:
    address = f"git+file://{repository}"
    found = texts(address)
    assert found[f"{address}/docs/tarn.md"] == "The harbour of Tarn."
    assert {id.removeprefix(address) for id in found} == {"/README.md", "/docs/tarn.md", "/link.md"}
    assert texts(address) == found, "the same again, so nothing is ingested twice"


def test_a_link_of_the_repository_leads_nowhere_on_this_machine(repository: Path) -> None:
    assert "SECRET" not in "".join(texts(f"git+file://{repository}").values())


def test_a_branch_and_a_folder_may_be_named(repository: Path) -> None:
    address = f"git+file://{repository}"
    assert texts(f"{address}@old/1.0#docs") == {f"{address}/docs/tarn.md": "The old harbour."}


def test_the_copy_is_gone_afterwards(repository: Path) -> None:
    with ExitStack() as stack:
        (first, *_) = open_locations([f"git+file://{repository}"], stack)
        path = first.fetch(Path())
        assert path.is_file()
    assert not path.exists()


def test_no_hook_and_no_submodule_is_followed(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = tmp_path / "hooks" / "post-checkout"
    hook.parent.mkdir()
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    hook.chmod(0o755)
    config = tmp_path / "config"
    config.write_text(f"[core]\nhooksPath = {hook.parent}\n[submodule]\nrecurse = true\n[protocol]\nallow = always\n")
    git(repository, "submodule", "add", "--quiet", f"file://{repository}", "inner")
    git(repository, "commit", "--quiet", "-m", "Add a submodule")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    found = texts(f"git+file://{repository}")
    assert not [id for id in found if "/inner/" in id]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("more", ["@nothing", "#nothing", "-gone"])
def test_what_is_not_there_is_an_error_with_a_reason(repository: Path, more: str) -> None:
    with pytest.raises(InputError, match=r"cannot be read|no folder"):
        list(load_locations([f"git+file://{repository}{more}"], LIMIT))


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("git+https://host/a/b.git", Repository("https://host/a/b.git")),
        ("git+https://host/a@v1.0#docs/en/", Repository("https://host/a", "v1.0", "docs/en")),
        ("git+ssh://git@host/a.git@main", Repository("ssh://git@host/a.git", "main")),
        ("git+file:///srv/a", Repository("file:///srv/a")),
    ],
)
def test_addresses_are_understood(address: str, parsed: Repository) -> None:
    assert parse_address(address) == parsed


@pytest.mark.parametrize(
    "address",
    [
        *("git+https://ada:hunter2@host/a", "git+https://hunter2@host/a", "git+ssh://ada:hunter2@host/a"),
        *(
            "git+ext::sh -c hunter2",
            "git+http://host/a",
            "git+git://host/a",
            "git+https://host/",
            "git+https://host/a?b",
        ),
        *("git+https://host/a@--upload-pack=x", "git+https://host/a@", "git+https://host/a#../../etc"),
    ],
)
def test_addresses_that_are_not_safe_are_refused_without_their_secrets(address: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_address(address)
    assert "hunter2@" not in str(refused.value)


def test_a_missing_program_is_said(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="program git"):
        list(load_locations([f"git+file://{repository}"], LIMIT))


@pytest.mark.parametrize("place", ["https://example.org/a.md", "gs://bucket/a", "ftp://host/a", "file:///etc/passwd"])
def test_other_addresses_are_refused(place: str) -> None:
    with pytest.raises(InputError, match="fetch others"):
        check_locations([place])


def test_paths_are_read_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "big.md").write_text("x" * (LIMIT + 1))
    check_locations(["a.md", "odd:name.md"])
    kept, refused, missing, twice = load_locations(["a.md", "big.md", "none.md", "a.md"], LIMIT)
    assert isinstance(kept, Document)
    for rejected, said in ((refused, "limit"), (missing, "no such file"), (twice, "already used")):
        assert isinstance(rejected, Rejected)
        assert said in str(rejected.error)
