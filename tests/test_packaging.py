"""What a user installs or clones is what it says."""

from __future__ import annotations

import ast
import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

import ragkv
from benchmarks.commands import bench
from tools.locked import Pin, canonical, read_pins
from tools.sbom import required

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXT_LIMIT = 2 * 2**20
PAGES_LIMIT = 14 * 10**6  # what the small model learns from
TEXTS_LIMIT = 976 * 10**4  # all other texts
MODEL_LIMIT = 50 * 10**6
ADAPTER_LIMIT = 21 * 10**6


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))) as archive:
        yield archive


def tracked() -> list[Path]:
    """Files of the repository: committed, or new and not ignored."""
    listing = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_the_wheel_carries_the_model_the_samples_and_the_type_markers(wheel: zipfile.ZipFile) -> None:
    sizes = {entry.filename: entry.file_size for entry in wheel.infolist()}
    for path in sorted((ROOT / "models").rglob("*")):
        if path.is_file():
            assert sizes.get(f"ragkv/{path.relative_to(ROOT)}") == path.stat().st_size, path.name
    for path in (path for path in (ROOT / "ragkv" / "samples").rglob("*") if path.is_file()):
        if "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT)) in sizes
    assert any(name.startswith("ragkv/samples/") for name in sizes)
    assert "ragkv/py.typed" in sizes


def test_the_sdist_carries_the_samples_and_the_model() -> None:
    # The names of what it would carry: packing the models takes six seconds.
    names = {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    there = [
        path for folder in ("ragkv/samples", "models/tiny", "models/adapter") for path in (ROOT / folder).iterdir()
    ]
    assert {str(path.relative_to(ROOT)) for path in there} <= names
    assert {"ragkv/api/app.py", "ragkv/ingest/pipeline.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "tools/"))]


def test_the_wheel_carries_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"ragkv", f"ragkv-{ragkv.__version__}.dist-info"}, "a user's own `api` stays his own"
    links = {f"ragkv/{path.relative_to(ROOT)}" for name in ("api", "ingest") for path in (ROOT / name).rglob("*.py")}
    assert links <= {*wheel.namelist()}, "what is a link in a checkout is a folder"
    assert len({*wheel.namelist()}) == len(wheel.namelist())
    assert not [name for name in wheel.namelist() if "__pycache__" in name or name.startswith("ragkv/tests")]


def test_the_wheel_has_the_version_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    info = f"ragkv-{ragkv.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {ragkv.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")
    assert b"SmolLM2" in wheel.read(f"{info}/licenses/NOTICE")
    assert "ragkv = ragkv.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_a_wheel_says_where_the_benchmarks_are(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    command = [sys.executable, "-m", "ragkv.cli", "bench", "ttft", "--chunks", "4"]
    alone = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ragkv: benchmarks are not part of the package; in a checkout of ragkv run `make bench`\n"


def test_a_wheel_outside_the_checkout_finds_its_bundled_models(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    ask = "from ragkv.config import bundled_models; print(bundled_models())"
    paths = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=tmp_path, env=paths, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).samefile(tmp_path / "ragkv" / "models")


def test_packages_named_api_and_ingest_of_a_user_take_nothing_away(tmp_path: Path) -> None:
    for name in ("api", "ingest"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    ask = "import api, ingest, ragkv.api.errors, ragkv.ingest.loader; print(api.MINE and ingest.MINE)"
    paths = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=tmp_path, env=paths, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def locked() -> dict[str, Pin]:
    """What constraints.txt lists, by name."""
    return {pin.name: pin for pin in read_pins((ROOT / "constraints.txt").read_text())}


def test_constraints_pin_every_dependency_inside_its_range() -> None:
    pinned = locked()
    for group, lines in {"run": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items():
        for requirement in map(Requirement, lines):
            pin = pinned.get(canonical(requirement.name))
            assert pin, f"{requirement.name}: run make lock"
            assert requirement.specifier.contains(pin.version), f"{pin.name} {pin.version}: {requirement.specifier}"
            assert group in pin.groups, f"{pin.name} is not listed for {group}"


@pytest.mark.parametrize(
    "file", ["constraints.txt", "constraints-cuda.txt", "constraints-oldest.txt", "constraints-vllm.txt"]
)
def test_every_package_has_hashes_and_names_what_needs_it(file: str) -> None:
    pins = read_pins((ROOT / file).read_text())
    assert pins
    for pin in pins:
        assert pin.groups, pin.name
        assert pin.hashes, pin.name
    assert len({pin.name for pin in pins}) == len(pins)


def test_what_is_installed_here_needs_nothing_that_is_not_listed() -> None:
    """pip is told to install what is listed and no more, so a package that is left out would be missing."""
    pins, asked = locked(), {"run": PROJECT["dependencies"], "dev": PROJECT["optional-dependencies"]["dev"]}
    for group, lines in asked.items():
        listed = {name for name, pin in pins.items() if group in pin.groups}
        # torch of a CUDA build needs more.
        listed |= {pin.name for pin in read_pins((ROOT / "constraints-cuda.txt").read_text())}
        assert not required(lines) - listed, f"{group}: run make lock"


@pytest.mark.parametrize("target", ["demo", "test", "test-oldest", "integrations", "scale", "docs", "dist"])
def test_make_installs_nothing_whose_hash_is_not_known(target: str, tmp_path: Path) -> None:
    installs = [line for line in bare_make(target, tmp_path).splitlines() if "pip install" in line or "locked" in line]
    assert any("tools.locked run build model" in line for line in installs)
    for line in installs:
        own = line.endswith("-m pip install --no-deps --no-build-isolation -e .")
        assert own or "-m tools.locked " in line, line


def test_the_image_installs_nothing_whose_hash_is_not_known() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    commands = [words for line in re.findall(r"^RUN (.*)$", text, re.M) for words in re.split("&&|;", line)]
    installs = [words for words in commands if "pip" in words or "tools.locked" in words]
    assert len(installs) >= 5
    for words in installs:
        assert "-m tools.locked " in words or "--no-deps" in words, words
        assert "pip install" not in words or "--no-index" in words, words
    assert "tools.locked run otel model" in text
    assert "!tools/locked.py" in (ROOT / ".dockerignore").read_text().splitlines()


def test_a_fresh_environment_gets_no_newer_versions_than_those_that_were_tested() -> None:
    extras = PROJECT["optional-dependencies"]
    lines = PROJECT["dependencies"] + [line for name in extras if name != "dev" for line in extras[name]]
    found = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    assert not [name for name, specifier in found.items() if not re.search("<|==", str(specifier))]
    (tested,) = re.findall(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    major, minor = map(int, tested)
    assert found["torch"].contains(f"{major}.{minor}.9")
    assert not found["torch"].contains(f"{major}.{minor + 1}.0")


def test_binaries_of_the_repository_are_the_bundled_models_and_small() -> None:
    model = adapter = pages = texts = 0
    for path in tracked():
        if path.is_relative_to(ROOT / "models" / "tiny"):
            model += path.stat().st_size
            continue
        if path.is_relative_to(ROOT / "models" / "adapter"):
            adapter += path.stat().st_size
            continue
        if path.is_relative_to(ROOT / "tools" / "demo_model"):
            pages += path.stat().st_size
        else:
            texts += path.stat().st_size
        assert b"\0" not in path.read_bytes(), f"{path.relative_to(ROOT)} is binary"
        assert path.stat().st_size < TEXT_LIMIT, f"{path.relative_to(ROOT)} is too large for a text"
    assert model < MODEL_LIMIT
    assert adapter < ADAPTER_LIMIT
    assert pages < PAGES_LIMIT
    assert texts < TEXTS_LIMIT


def image_healthcheck() -> list[str]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    found = re.search(r"^HEALTHCHECK .*? CMD (\[.*\])$", text, re.MULTILINE)
    assert found, "Dockerfile has no HEALTHCHECK in exec form"
    command: list[str] = json.loads(found.group(1))
    return command


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_images_healthcheck_follows_healthz(status: int, healthy: bool) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [sys.executable, *image_healthcheck()[1:]]
        port = {**os.environ, "RAGKV_PORT": str(server.server_port), "http_proxy": "http://127.0.0.1:1"}
        done = subprocess.run(command, env=port, capture_output=True, timeout=30, check=False)
        server.shutdown()
    assert (done.returncode == 0) is healthy


def test_the_image_runs_the_service_as_an_ordinary_user() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    words = [shlex.split(line) for line in lines if line.startswith(("USER ", "ENTRYPOINT ", "VOLUME "))]
    assert ["USER", "ragkv"] in words
    assert 'ENTRYPOINT ["ragkv"]' in lines
    assert 'CMD ["serve"]' in lines
    assert ["VOLUME", "/data"] in words


def test_ci_runs_lint_and_both_test_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    targets = subprocess.run(["make", "-n", "help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert targets.returncode == 0, targets.stderr
    assert "for step in lint test test-oldest" in script.read_text()


MODEL = re.compile(r"tools\.locked .*\bmodel\b")
SERVERS = ("tests.program", "tests.forked", "tests.redis_server", "tests.redis_cluster", "playwright")


def make_words(variable: str) -> list[str]:
    """The words of a variable of the Makefile."""
    show = ["make", "-s", "--eval", f"show:; @echo $({variable})", "show"]
    done = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_what_messages_say_to_install_can_be_installed() -> None:
    """ragkv itself comes from a checkout or a wheel: an index need not have it."""
    extras = PROJECT["optional-dependencies"]
    known = {*PROJECT["dependencies"], *(line for name in extras if name != "dev" for line in extras[name])}
    told = {}
    for path in (each for room in ("ragkv", "api", "ingest", "benchmarks") for each in (ROOT / room).rglob("*.py")):
        for command in re.findall(r"pip install(?:[ \"\n]+'[^']+')+", path.read_text()):
            told[path.name] = re.findall(r"'([^']+)'", command)
    assert {"plot.py", "placement.py", "tune.py", "app.py", "gguf.py"} <= told.keys()
    assert not [(name, line) for name, lines in told.items() for line in lines if line not in known]


def bare_make(target: str, folder: Path) -> str:
    """What make would run for a target in a fresh clone on a machine without any program that tests need."""
    for name in ("Makefile", "pyproject.toml", *(path.name for path in ROOT.glob("constraints*.txt"))):
        shutil.copy(ROOT / name, folder)
    done = subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_and_the_service_are_set_up_without_the_tools_of_tests(tmp_path: Path) -> None:
    extras = set(PROJECT["optional-dependencies"])
    for target in ("demo", "serve"):
        commands = bare_make(target, tmp_path)
        assert "-e ." in commands
        assert MODEL.search(commands), "the default model answers"
        named = {extra for names in re.findall(r"tools\.locked (.+)$", commands, re.M) for extra in names.split()}
        assert not named & extras, f"make {target} installs {named}"
        assert "installing Debian" not in commands, "the service needs no further program"
    assert "tools.locked dev" in bare_make("test", tmp_path)


@pytest.mark.parametrize(("target", "programs"), [("test", "redis-server chromium curl"), ("test-oldest", "curl")])
def test_make_installs_the_programs_that_tests_run(target: str, programs: str, tmp_path: Path) -> None:
    commands = bare_make(target, tmp_path)
    for program in programs.split():
        assert f"apt-get install -y --no-install-recommends {program};" in commands


def test_make_check_starts_no_server_and_no_browser() -> None:
    checked = make_words("CHECKED")
    assert checked
    for name in checked:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        assert files, f"{name} of make check is not there"
        for file in files:
            tree = ast.parse(file.read_text())
            imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            imported += [each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names]
            foreign = [each for each in imported if each.startswith(SERVERS)]
            assert not foreign, f"{file.relative_to(ROOT)} belongs to make test only"


def test_make_bench_names_commands() -> None:
    named = re.search(r"## benchmarks; BENCH=\"(.*)\"", (ROOT / "Makefile").read_text())
    assert named
    assert {command.name for command in bench.registered_commands} == set(named.group(1).split())
    assert set(make_words("BENCH")) <= set(named.group(1).split())
