"""The README and docs/ agree with the program: commands, options, settings, links, file names, faults.

Each check is a function that returns what it finds wrong, so that a test can also show that it finds something.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from pydantic import SecretStr

from benchmarks.commands import bench as benchmarks
from ragkv import __version__
from ragkv.cli import app
from ragkv.config import Settings
from ragkv.engine.policies import DECODE_NAMES, DECODES, PREFILL_NAMES, PREFILLS
from ragkv.engine.registry import FULL, METHOD_NAMES, METHODS, FullPrefill
from ragkv.model.source import ADAPTER_NAME, NAME

README_LINES = 120
CHANGELOG_LINES = 150
OTHERS_OPTIONS = {"--profile", "--seconds", "--enable-log-requests", "--no-enable-prefix-caching"}
"""Options that a page names by themselves and that belong to other programs: Docker Compose, tools/demo_model, vLLM."""
PAGES = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "docs/api.md",
    "docs/architecture.md",
    "docs/benchmarks.md",
    "docs/cli.md",
    "docs/compatibility.md",
    "docs/concepts.md",
    "docs/dashboard.md",
    "docs/faults.md",
    "docs/formats.md",
    "docs/front-ends.md",
    "docs/frameworks.md",
    "docs/guides/calibrate.md",
    "docs/guides/folder.md",
    "docs/guides/gpu.md",
    "docs/guides/http.md",
    "docs/guides/keys.md",
    "docs/guides/operate.md",
    "docs/guides/redis.md",
    "docs/guides/vllm.md",
    "docs/index.md",
    "docs/lab-notes.md",
    "docs/methods.md",
    "docs/models.md",
    "docs/operations.md",
    "docs/quickstart.md",
    "docs/results/cpu.md",
    "docs/results/decode.md",
    "docs/results/gpu.md",
    "docs/results/lmcache.md",
    "docs/results/vllm.md",
    "docs/results/prefill.md",
    "docs/results/quality.md",
    "docs/results/retrieval.md",
    "docs/results/scale.md",
    "docs/results/serve.md",
    "docs/results/store.md",
    "docs/settings.md",
    "docs/tuning.md",
    "models/adapter/README.md",
    "models/tiny/README.md",
    "tools/demo_model/README.md",
]


# Commands


def command_options(group: Any = None, name: str = "") -> dict[str, set[str]]:
    """Map every command of the program, such as `bench quality`, to its options."""
    group = group or typer.main.get_command(app)
    found: dict[str, set[str]] = {name: {"--help", "--version", "--install-completion", "--show-completion"}}
    for word, command in group.commands.items():
        full = f"{name} {word}".strip()
        if full == "bench":  # hands its arguments on
            command = typer.main.get_command(benchmarks)
        if hasattr(command, "commands"):
            found |= command_options(command, full)
        else:
            options = {option for parameter in command.params for option in getattr(parameter, "opts", [])}
            found[full] = {option for option in options if option.startswith("-")} | {"--help"}
    return found


def code_of(text: str) -> Iterator[str]:
    """Yield the lines of code blocks, with continued lines joined, and the code spans of the prose."""
    joined = text.replace("\\\n", " ")
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", joined, re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", joined, flags=re.M | re.S)
    for block in fenced:
        yield from block.splitlines()
    yield from re.findall(r"^    (.*)$", prose, re.M)
    for span in re.findall(r"`([^`]+)`", re.sub(r"^    .*$", "", prose, flags=re.M)):
        yield " ".join(span.split())


def wrong_commands(text: str) -> list[str]:
    """Return the commands and options in a page that the program does not have."""
    known, wrong = command_options(), []
    every_option = set().union(*known.values())
    for line in code_of(text):
        code = line.split(" # ")[0].replace(f"{NAME} + {ADAPTER_NAME}", "NAME")
        if code.startswith("--") and (option := re.split(r"[ =]", code)[0]) not in every_option | OTHERS_OPTIONS:
            wrong.append(option)
        for called in re.findall(r"(?:^|[ /;])ragkv ([a-z-][^;|]*)", code):
            words = called.split()
            taken = 2 if words[0] == "bench" and len(words) > 1 and not words[1].startswith(("-", "…")) else 1
            command = "" if words[0].startswith("-") else " ".join(words[:taken])
            if command not in known:
                wrong.append(f"ragkv {command}")
                continue
            options = {word.split("=")[0] for word in words if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
            wrong += [f"ragkv {command} {option}" for option in sorted(options - known[command])]
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist_with_their_options(root: Path, page: str) -> None:
    assert not wrong_commands((root / page).read_text())


def test_a_command_or_an_option_that_does_not_exist_is_found() -> None:
    page = "Run `ragkv ask --method full`, `ragkv bench nothing` and `--nowhere`.\n\n"
    page += "    ragkv ingest a.md \\\n      --colour red\n"
    assert sorted(wrong_commands(page)) == ["--nowhere", "ragkv bench nothing", "ragkv ingest --colour"]


def test_every_command_method_and_policy_is_documented(root: Path) -> None:
    commands = (root / "docs" / "cli.md").read_text() + (root / "docs" / "benchmarks.md").read_text()
    assert not [name for name in command_options() if f"ragkv {name}" not in commands]
    methods = (root / "docs" / "methods.md").read_text()
    assert not [name for name in (*METHOD_NAMES, *PREFILL_NAMES, *DECODE_NAMES) if f"`{name}`" not in methods]


# Methods and policies


def parameters() -> dict[str, dict[str, Any]]:
    """Map every method and policy to its parameters and their defaults."""
    found: dict[str, dict[str, Any]] = {FULL: {each.name: each.default for each in dataclasses.fields(FullPrefill)}}
    for registry in (METHODS, PREFILLS, DECODES):
        for name, spec in registry.items():
            found.setdefault(name, {}).update({field.name: field.default for field in dataclasses.fields(spec.kind)})
    return found


def wrong_specifications(text: str) -> list[str]:
    """Return the specifications NAME:FIELD=VALUE,… of a page whose name or fields do not exist."""
    known, wrong = parameters(), []
    for name, fields in re.findall(r"(?<![\w:/.-])([a-z]+(?:-[a-z]+)*):([a-z_]+=[^\s`|;)]+)", text):
        given = [part.split("=")[0] for part in fields.split(",") if "=" in part]
        wrong += [f"{name}:{field}" for field in given if field not in known.get(name, {})]
    return wrong


def wrong_parameters(page: str) -> list[str]:
    """Return the parameters in the table of docs/methods.md that do not exist or have another default."""
    known, wrong = parameters(), []
    for name, fields, defaults in re.findall(r"^\| `([a-z-]+):([a-z_]+`(?:, `[a-z_]+`)*) \| ([^|]+) \|", page, re.M):
        names = re.findall(r"[a-z_]+", fields)
        written = [default.strip("` ") for default in defaults.split(",")]
        for field, default in zip(names, written, strict=True) if len(names) == len(written) else ():
            actual = known.get(name, {}).get(field, "missing")
            same = float(default) == actual if re.fullmatch(r"[\d.]+", default) else default in (actual, "none")
            wrong += [] if same else [f"{name}:{field}"]
        wrong += [f"{name}:{field}" for field in names if field not in known.get(name, {})]
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_the_specifications_of_a_page_are_valid(root: Path, page: str) -> None:
    assert not wrong_specifications((root / page).read_text())


def test_the_parameters_of_methods_have_the_defaults_that_are_written(root: Path) -> None:
    page = (root / "docs" / "methods.md").read_text()
    assert not wrong_parameters(page)
    assert wrong_parameters(page.replace("| `scout:tail` | 64 |", "| `scout:tail` | 65 |")) == ["scout:tail"]
    assert wrong_specifications("`epic:link=64`, `epic:links=64`, `psa:block=3,parts=1`") == ["epic:links", "psa:parts"]


# Settings


def written_default(value: Any) -> str:
    """Return a default as docs/settings.md writes it."""
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value == "":
        return "empty"
    text = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{text}`"


def wrong_settings(page: str) -> list[str]:
    """Return what docs/settings.md has too much, too little, or with another default."""
    rows = dict(re.findall(r"^\| `RAGKV_([A-Z_]+)` \| (`[^`]*`|empty)", page, re.M))
    actual = {name.upper(): written_default(field.default) for name, field in Settings.model_fields.items()}
    return sorted(name for name in rows.keys() | actual.keys() if rows.get(name) != actual.get(name))


def test_the_settings_page_has_every_setting_with_its_default(root: Path) -> None:
    assert not wrong_settings((root / "docs" / "settings.md").read_text())


def test_a_wrong_default_a_lost_and_an_invented_setting_are_found(root: Path) -> None:
    page = (root / "docs" / "settings.md").read_text()
    for old, new in (("| `6` |", "| `7` |"), ("| `RAGKV_QUEUE`", "| `RAGKV_LINE`"), ("| `RAGKV_KEY` | empty", "| ")):
        assert old in page
        assert wrong_settings(page.replace(old, new))


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith(("README", "docs"))])
def test_the_settings_that_a_page_names_exist(root: Path, page: str) -> None:
    known = {name.upper() for name in Settings.model_fields}
    assert not set(re.findall(r"RAGKV_([A-Z_]*[A-Z])", (root / page).read_text())) - known


# Links and names


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in re.findall(r"^#+ +(.+)$", prose, re.M)]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Return the relative links and images of a page that lead nowhere, anchors included."""
    prose = re.sub(r"^```.*?^```|^    .*?$|`[^`]*`", "", text, flags=re.M | re.S)
    broken = []
    for target in re.findall(r"\]\(\s*([^)\s]+)\s*\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        if not path.exists() or (anchor and anchor not in anchors(text if path == page else path.read_text())):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_the_links_and_images_of_a_page_lead_somewhere(root: Path, page: str) -> None:
    assert not broken_links(root / page, (root / page).read_text())


def test_a_broken_link_image_or_anchor_is_found(root: Path) -> None:
    text = "# A page\n\n[good](docs/api.md#errors) [here](#a-page) [no](#b) [no](docs/x.md)\n"
    text += "![no](x.svg) [no](docs/api.md#x)\n"
    assert broken_links(root / "README.md", text) == ["#b", "docs/x.md", "x.svg", "docs/api.md#x"]


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(root: Path, page: str) -> None:
    named = re.findall(
        r"`((?:ragkv|api|ingest|tests|docs|models|tools|deploy)/[\w./-]+\.\w+)`", (root / page).read_text()
    )
    assert not [name for name in named if not (root / name).exists()]


def test_every_page_is_checked_and_reached_from_the_readme(root: Path) -> None:
    """Directly, or by the landing page of docs/."""
    pages = {path.relative_to(root).as_posix() for path in (root / "docs").rglob("*.md")}
    assert pages <= set(PAGES)
    readme, landing = ((root / page).read_text() for page in ("README.md", "docs/index.md"))
    assert "](docs/index.md)" in readme
    assert not [page for page in pages if f"]({page})" not in readme and f"]({page[5:]})" not in landing]


def test_the_site_has_every_page_and_notebook_once(root: Path) -> None:
    named = re.findall(r"^ +- [^:]+: ([\w/-]+\.md)$", (root / "mkdocs.yml").read_text(), re.M)
    made = {"reference/http.md", "reference/client.md", "reference/engine.md"}
    outside = {"changelog.md", "models/adapter.md", "models/tiny.md"}
    pages = {path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")}
    books = {path.relative_to(root / "docs").with_suffix(".md").as_posix() for path in root.glob("docs/**/*.ipynb")}
    assert sorted(named) == sorted(pages | books | made | outside)


@pytest.mark.parametrize("name", ["stored", "selected", "recomputed"])
def test_pictures_of_the_concepts_are_small_and_legible_on_light_and_dark_pages(root: Path, name: str) -> None:
    text = (root / "docs" / "images" / f"{name}.svg").read_text()
    assert len(text.encode()) < 10_000
    picture = ElementTree.fromstring(text)
    first = picture.find("{http://www.w3.org/2000/svg}rect")
    assert first is not None
    assert first.get("fill") == "#ffffff", "its own ground, whatever the page has"
    assert first.get("width") == str(picture.get("viewBox")).split()[2]
    assert picture.find("{http://www.w3.org/2000/svg}title") is not None


def test_the_changelog_begins_with_the_present_version(root: Path) -> None:
    text = (root / "CHANGELOG.md").read_text()
    released = re.findall(r"^## (\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d$", text, re.M)
    assert released[0] == __version__
    assert "\n## Unreleased\n" in text
    assert set(re.findall(r"^### (\w+)$", text, re.M)) <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
    }
    assert len(text.splitlines()) <= CHANGELOG_LINES


def test_the_contract_names_every_part_that_is_stable(root: Path) -> None:
    text = (root / "docs" / "compatibility.md").read_text()
    for part in ("HTTP, `/v1`", "Command line", "Settings", "Python", "Report", "Metrics", "MCP", "Stored bytes"):
        assert f"\n| {part} | " in text


def test_the_readme_is_short(root: Path) -> None:
    assert len((root / "README.md").read_text().splitlines()) <= README_LINES


# Faults and architecture


def test_every_fault_is_followed_by_tests_that_exist(root: Path) -> None:
    text = (root / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*$", text, re.M)
    assert rows == [str(number) for number in range(1, len(rows) + 1)]
    assert len(rows) >= 23
    assert all("`tests/" in row for row in re.findall(r"^\| \d+ \|.*$", text, re.M))
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        functions = {n.name for n in ast.walk(ast.parse((root / path).read_text())) if isinstance(n, ast.FunctionDef)}
        assert name in functions, f"{path}::{name}"


def members(sources: Iterable[str]) -> dict[str, set[str]]:
    """Return the names of what each class defines or has from its bases, which are known by their names."""
    own, bases = dict[str, set[str]](), dict[str, set[str]]()
    for node in (node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
        names = own.setdefault(node.name, set())
        names |= {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
        names |= {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
        stored = (
            part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        )
        names |= {part.attr for part in stored}
        above = (ast.unparse(base).partition("[")[0] for base in node.bases)
        bases.setdefault(node.name, set()).update(name.rpartition(".")[2] for name in above)
    for _ in range(4):  # bases of bases
        for name, known in own.items():
            known.update(*(own.get(base, ()) for base in bases[name]))
    return own


def missing_functions(text: str, sources: Iterable[str]) -> list[str]:
    """Return the `Class.function` names of a page that are not in the sources."""
    named = dict.fromkeys(re.findall(r"`(?:[a-z_]+\.)*([A-Z]\w+)\.(_?[a-z]\w+)(?:\(\))?`", text))
    known = members(sources)
    return [f"{kind}.{function}" for kind, function in named if function not in known.get(kind, ())]


def test_the_functions_that_the_architecture_names_exist(root: Path) -> None:
    sources = [path.read_text() for room in ("ragkv", "ingest", "api") for path in (root / room).rglob("*.py")]
    assert missing_functions("`Nobody.does`, `Engine.step`, `Engine.answer`", sources) == ["Nobody.does", "Engine.step"]
    assert not missing_functions((root / "docs" / "architecture.md").read_text(), sources)
