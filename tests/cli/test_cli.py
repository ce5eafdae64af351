"""The program `ragkv`: what it prints, where, and with which exit code. The engine and the bundled model are real."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

from ragkv import config
from ragkv.catalog import Catalog
from ragkv.cli import app, run
from ragkv.errors import ConfigError
from ragkv.ingest.jobs import Jobs
from ragkv.model.decoder import DecoderModel
from ragkv.types import Document
from tests import families
from tests.engine.test_self_test import Relative, broken
from tests.forked import forked
from tests.ingest.formats.packages import xlsx
from tests.program import served
from tests.redis_server import redis_server
from tests.start_records import with_records

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "Who built the harbour of Tarn?"
LINES = [
    {
        "id": "harbour",
        "title": "Tarn",
        "text": "The harbour of Tarn was built in 1889 by Ada Brook.",
        "metadata": {"year": 1889, "tags": ["sea", "stone"]},
    },
    {
        "id": "bridge",
        "title": "Mell",
        "text": "The bridge of Mell was painted green by Otto Lindqvist in 1931.",
        "metadata": {"year": "1931", "tags": ["land"]},
    },
]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Program:
    """Runs commands in this process, as the entry point does."""

    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> Done:
        code = run([str(argument) for argument in arguments])
        printed = self.capture.readouterr()
        return Done(code, printed.out, printed.err)


@pytest.fixture
def ragkv(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with two documents. Tests that use it leave it as it is."""
    folder = tmp_path_factory.mktemp("cli")
    with_records(folder / "data")
    (folder / "two.jsonl").write_text("\n".join(map(json.dumps, LINES)), encoding="utf-8")
    assert run(["ingest", str(folder / "two.jsonl"), "--data", str(folder / "data"), "--device", "cpu"]) == 0
    return folder / "data"


@contextmanager
def program(arguments: Sequence[object], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The program in a process of its own, which does not outlive the test."""
    command = [sys.executable, "-m", "ragkv.cli", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def is_one_line(text: str) -> bool:
    return text.startswith("ragkv: ") and text.count("\n") == 1 and text.endswith("\n")


# Usage and settings


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ask", "who?", "--prefill", "minference"], "critiprefill"),
        (["ask", "who?", "--decode", "quest"], "psa"),
        (["ask", "who?", "--decode", "psa:budget=3"], "threshold"),
        (["ask"], "QUESTION"),
        (["ask", "who?", "--file", "q.jsonl"], "--file"),
        (["ask", "who?", "--top-k", "0"], "--top-k"),
        (["ask", "who?", "--max-tokens", "many"], "--max-tokens"),
        (["ask", "who?", "--nonsense"], "--nonsense"),
        (["ingest"], "PATH"),
        (["ingest", "notes", "--ray", "--watch"], "--ray"),
        (["ingest", "notes", "--json", "--url", "http://127.0.0.1:9"], "--json"),
        (["rm"], "ID"),
        (["dance"], "dance"),
        (["bench", "dance"], "dance"),
        (["serve", "--port", "70000"], "--port"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(ragkv: Program, arguments: list[str], words: str) -> None:
    done = ragkv(*arguments)
    assert (done.code, done.out) == (2, "")
    assert is_one_line(done.err)
    assert words in done.err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAGKV_TOP_K", "none"),
        ("RAGKV_PORT", "99999"),
        ("RAGKV_PREFIX", "sideways"),
        ("RAGKV_STORE_BODY", "int4"),
        ("RAGKV_STORE_SECRET", "geheim"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(
    ragkv: Program, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    done = ragkv("ls")
    assert done.code == 2
    assert is_one_line(done.err)
    assert name.removeprefix("RAGKV_").lower() in done.err
    assert "geheim" not in done.err


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RAGKV_TOPK", "did you mean RAGKV_TOP_K?"),
        ("ragkv_modle", "RAGKV_MODEL?"),
        ("RAGKV_X", "see docs/settings.md"),
        ("RAGKV_OCR_SECONDS", "RAGKV_OCR=50"),
        ("RAGKV_REPLICA_REQUESTS", "it follows from RAGKV_BATCH"),
        ("RAGKV_MAX_REPLICAS", "write RAGKV_REPLICAS=2-8"),
        ("RAGKV_OIDC_READERS", "write RAGKV_OIDC_ROLES='CLAIM: VALUE=reader, VALUE=writer'"),
        ("RAGKV_PAGED", "write RAGKV_GRAPHS=paged"),
    ],
)
def test_a_misspelt_setting_is_named_by_every_command_with_the_nearest_name(
    ragkv: Program, data: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    monkeypatch.setenv(name, "3")
    done = ragkv("ls", "--data", data)
    assert (done.code, is_one_line(done.err)) == (0, True)
    assert f"{name} is no setting and has no effect; " in done.err
    assert hint in done.err
    monkeypatch.delenv(name)
    assert ragkv("ls", "--data", data).err == ""


@pytest.mark.parametrize("name", config.RETIRED)
def test_a_setting_that_there_was_is_refused_in_the_file_with_what_to_write_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "ragkv.toml").write_text(f"{name.lower()} = 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        config.load_settings()
    assert str(caught.value) == f"settings: {name.lower()}: {config.RETIRED[name]}"
    named = re.findall(r"RAGKV_([A-Z_]+)", config.RETIRED[name])
    assert {each.lower() for each in named} <= config.Settings.model_fields.keys()


def test_a_misspelt_secret_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ragkv_api_kyes").write_text("geheim")
    (tmp_path / "ragkv_store_secret").write_text("geheim")
    monkeypatch.setattr(config, "SECRETS", tmp_path)
    assert config.unknown_variables() == [("ragkv_api_kyes", "did you mean RAGKV_API_KEYS?")]


def test_a_command_that_there_is_not_names_where_all_are(ragkv: Program) -> None:
    wrong = ragkv("frage")
    assert (wrong.code, wrong.err) == (2, "ragkv: No such command 'frage'; `ragkv --help` lists all\n")


def test_without_a_command_the_help_is_shown(ragkv: Program) -> None:
    done = ragkv()
    assert done.code == 2
    assert "ingest" in done.out


def test_no_library_complains_as_a_command_ends() -> None:
    # Triton's bindings list what they hold, unless its cycles are collected as the interpreter ends.
    program = "import triton; from ragkv.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_told(ragkv: Program) -> None:
    from ragkv import __version__

    assert ragkv("--version") == Done(0, f"ragkv {__version__}\n", "")


def test_an_unknown_model_is_one_line_with_its_path_and_exit_2(ragkv: Program, data: Path) -> None:
    done = ragkv("ask", QUESTION, "--data", data, "--model", "/no/such/model")
    assert done.code == 2
    assert is_one_line(done.err)
    assert "/no/such/model" in done.err


def test_a_damaged_catalogue_is_refused_with_exit_2_and_left_alone(ragkv: Program, tmp_path: Path) -> None:
    damaged = tmp_path / "catalog.sqlite"
    damaged.write_bytes(b"x" * 4096)
    done = ragkv("ls", "--data", tmp_path)
    assert done.code == 2
    assert is_one_line(done.err)
    assert damaged.read_bytes() == b"x" * 4096


# Documents


def test_documents_are_ingested_listed_and_removed(ragkv: Program, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# The lamp\n\nThe lamp was lit at dusk.", encoding="utf-8")
    (tmp_path / "docs" / "b.txt").write_bytes(b"not\0text")
    with_records(tmp_path / "d")
    first = ragkv("ingest", "docs", "gone.txt", "--data", "d", "--collection", "lamps")
    again = ragkv("ingest", "docs/a.md", "--data", "d", "--collection", "lamps")
    listed = ragkv("ls", "--data", "d")
    elsewhere = ragkv("ls", "--data", "d", "--collection", "default")
    removed = ragkv("rm", "docs/a.md", "--data", "d", "--collection", "lamps")
    assert first.code == 1
    assert first.out.startswith("added")
    assert [line.split(":")[0] for line in first.err.splitlines() if "ragkv: " in line] == ["ragkv"] * 2
    assert all(name in first.err for name in ("docs/b.txt", "gone.txt"))
    assert (again.code, again.out.split()[0]) == (0, "unchanged")
    assert listed.out.splitlines()[1].split("\t")[:3] == ["docs/a.md", "The lamp", "1"]
    assert listed.out.endswith("lamps\n")
    assert (elsewhere.code, elsewhere.out) == (0, "")
    assert removed.code == 0
    assert ragkv("ls", "--data", "d").out == ""
    assert list((tmp_path / "d" / "kv").rglob("*.kv")) == []


def test_an_ingest_prints_an_object_a_document_and_the_sums(ragkv: Program, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The lamp was lit at dusk.", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"not\0text")
    arguments = ("ingest", tmp_path, "--json", "--data", with_records(tmp_path / "d"), "--device", "cpu")
    first, again = ragkv(*arguments), ragkv(*arguments)
    lines = [json.loads(line) for line in first.out.splitlines()]
    sums, again_sums = lines.pop(), json.loads(again.out.splitlines()[-1])
    assert (first.code, again.code) == (1, 1)
    assert sorted((each["status"], "error" in each) for each in lines) == [("added", False), ("failed", True)]
    assert sums.pop("seconds") > 0
    assert sums == {"added": 1, "replaced": 0, "unchanged": 0, "failed": 1, "encoded_chunks": 1, "workers": 1}
    assert (again_sums["unchanged"], again_sums["encoded_chunks"]) == (1, 0)


def test_a_file_that_takes_longer_than_the_setting_allows_is_told_and_the_others_go_in(
    ragkv: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "page.html").write_text("<title>The yard</title><p>Calloway Yard was founded by Edda Calloway.")
    (tmp_path / "in" / "slow.html").write_bytes(b"<p>word " * 1_900_000)
    monkeypatch.setenv("RAGKV_PARSE_SECONDS", "3")
    done = ragkv("ingest", tmp_path / "in", "--data", with_records(tmp_path / "data"), "--device", "cpu")
    assert done.code == 1
    assert "in/slow.html: reading it took longer than 3 s" in done.err
    listed = ragkv("ls", "--data", tmp_path / "data")
    assert "in/page.html\tThe yard" in listed.out


def test_a_list_begins_with_the_names_of_its_columns(ragkv: Program, data: Path) -> None:
    first, *rest = ragkv("ls", "--data", data).out.splitlines()
    assert first.split("\t") == ["id", "title", "chunks", "tokens", "collection"]
    assert {len(line.split("\t")) for line in rest} == {5}


def test_a_list_as_json_is_an_object_a_document(ragkv: Program, data: Path) -> None:
    bridge, harbour = map(json.loads, ragkv("ls", "--data", data, "--json").out.splitlines())
    assert (bridge["id"], harbour["id"], harbour["title"], harbour["collection"]) == (
        *("bridge", "harbour", "Tarn", "default"),
    )
    assert (harbour["bytes"], harbour["version"], harbour["chunks"]) == (len(LINES[0]["text"]), 1, 1)
    assert harbour["metadata"] == LINES[0]["metadata"]
    assert isinstance(harbour["created"], float)
    assert ragkv("ls", "--data", data, "--search", "nowhere", "--json").out == ""


def test_folders_that_are_not_read_are_named_and_end_an_ingest_with_1(ragkv: Program, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "line.txt").write_text(LINES[0]["text"])
    (tmp_path / "in" / "linked").symlink_to(tmp_path)
    where = ("--data", with_records(tmp_path / "d"), "--device", "cpu")
    done = ragkv("ingest", tmp_path / "in", *where, "--json")
    assert done.code == 1
    assert "in/linked: a linked folder is not read" in done.err
    *outcomes, sums = map(json.loads, done.out.splitlines())
    assert {(each["document_id"], each["status"]) for each in outcomes} == {("in/line.txt", "added"), (None, "failed")}
    assert (sums["added"], sums["failed"]) == (1, 1)
    (tmp_path / "in" / "linked").unlink()
    (tmp_path / "other" / "in").mkdir(parents=True)
    (tmp_path / "other" / "in" / "line.txt").write_text(LINES[1]["text"])
    again = ragkv("ingest", tmp_path / "in" / "line.txt", tmp_path / "other" / "in", *where)
    assert again.code == 0
    assert "unchanged  in/line.txt" in again.out
    assert "added      other/in/line.txt" in again.out


def test_what_a_reader_warns_of_is_told_at_the_ingest(ragkv: Program, tmp_path: Path) -> None:
    (tmp_path / "towns.csv").write_bytes("Name;Ort\nJürgen;Köln\nSören;Düsseldorf\n".encode("windows-1252"))
    row = '<row><c t="inlineStr"><is><t>Crane</t></is></c><c><f>A1+A2</f></c></row>'
    (tmp_path / "sums.xlsx").write_bytes(xlsx({"Sums": row}))
    (tmp_path / "line.jsonl").write_text(
        '{"id": "sent", "text": "x", "metadata": {"encoding": "mine", "warnings": ["w"]}}'
    )
    names = ("towns.csv", "sums.xlsx", "line.jsonl")
    where = ("--data", with_records(tmp_path / "d"), "--device", "cpu", "--json")
    done = ragkv("ingest", *(tmp_path / name for name in names), *where)
    assert done.code == 0
    outcomes = {each.get("document_id"): each.get("warnings") for each in map(json.loads, done.out.splitlines())}
    assert outcomes["sent"] is None
    assert outcomes["towns.csv"] == [
        "read as windows-1252, which it does not say; save it as UTF-8 if letters are wrong"
    ]
    assert "formula" in outcomes["sums.xlsx"][0]
    told = [line for line in done.err.splitlines() if line.startswith("ragkv: ") and ("csv" in line or "xlsx" in line)]
    assert told == [f"ragkv: {name}: {outcomes[name][0]}" for name in names[:2]]


def test_a_list_is_sorted_searched_and_long(ragkv: Program, data: Path) -> None:
    def ids(*options: str) -> list[str]:
        return [line.split("\t")[0] for line in ragkv("ls", "--data", data, *options).out.splitlines()[1:]]

    assert ids("--sort", "title") == ["bridge", "harbour"]
    assert ids("--sort", "title", "--desc") == ["harbour", "bridge"]
    assert ids("--search", "TARN") == ["harbour"]
    assert "try other words" in ragkv("ls", "--data", data, "--search", "nowhere").err
    first, row, *_ = ragkv("ls", "--data", data, "--long").out.splitlines()
    assert first.split("\t")[5:] == ["bytes", "version", "created", "updated"]
    assert row.split("\t")[5:7] == [str(len(LINES[1]["text"])), "1"]
    wrong = ragkv("ls", "--data", data, "--sort", "hash")
    assert (wrong.code, is_one_line(wrong.err)) == (1, True)


def test_a_document_is_shown_with_its_chunks(ragkv: Program, data: Path) -> None:
    text = LINES[0]["text"]
    shown = json.loads(ragkv("show", "harbour", "--data", data, "--text", "--chunks", "--json").out)
    assert (shown["document"]["title"], shown["document"]["bytes"], shown["text"]) == ("Tarn", len(text), text)
    assert [(chunk["chunk"], chunk["start"], chunk["end"]) for chunk in shown["chunks"]] == [(0, 0, len(text))]
    plain = ragkv("show", "harbour", "--data", data, "--chunks").out
    assert f"harbour#0 · characters 0-{len(text)}" in plain
    for command in ("show", "rm"):
        missing = ragkv(command, "nothing", "--data", data)
        assert (missing.code, "has no document 'nothing'; `ragkv ls` lists them" in missing.err) == (1, True)
        assert "has no document 'harb'; is it 'harbour'?" in ragkv(command, "harb", "--data", data).err


def test_passages_are_searched_without_a_model(ragkv: Program, data: Path) -> None:
    options = ("--data", data, "--top-k", 1)
    found = json.loads(ragkv("search", QUESTION, *options, "--json").out)
    assert [(each["document_id"], each["text"]) for each in found["passages"]] == [("harbour", LINES[0]["text"])]
    plain = ragkv("search", QUESTION, *options, "--filter", "year=1889")
    assert (plain.code, LINES[0]["text"] in plain.out, "chunks compared" in plain.err) == (0, True, True)
    assert "no passage" in ragkv("search", QUESTION, *options, "--document", "nothing").out
    missing = ragkv("search", QUESTION, "--data", data, "--collection", "none")
    assert (missing.code, is_one_line(missing.err)) == (1, True)


def test_files_that_a_folder_has_and_ingest_does_not_read_are_named(ragkv: Program, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("photo.png", "notes.odt", ".hidden.png"):
        (tmp_path / "in" / name).write_bytes(b"x")
    done = ragkv("ingest", tmp_path / "in", "--data", tmp_path / "d", "--model", "/no/such/model")
    assert done.code == 1
    assert "skipped 2 files" in done.err
    assert all(name in done.err for name in ("in/photo.png", "in/notes.odt"))
    assert "hidden" not in done.err


def test_of_many_skipped_files_those_that_may_be_texts_are_named_and_the_others_counted(
    ragkv: Program, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("Artistic", "MPL-2.0", *(f"{number}.png" for number in range(12)), "style.CSS"):
        (tmp_path / "in" / name).write_bytes(b"x")
    done = ragkv("ingest", tmp_path / "in", "--data", tmp_path / "d", "--model", "/no/such/model")
    told = " ".join(done.err.split())
    assert "skipped 15 files" in told
    assert "in/Artistic, " in told
    assert "in/MPL-2.0, " in told
    assert "12 × .png, 1 × .css; a text needs the suffix .txt" in told
    assert "0.png" not in told


def test_a_question_without_documents_loads_no_model(ragkv: Program, data: Path, tmp_path: Path) -> None:
    for folder, collection in ((tmp_path / "none", "default"), (data, "nothing")):
        done = ragkv("ask", QUESTION, "--data", folder, "--collection", collection, "--model", "/no/such/model")
        assert done.code == 1
        assert f"collection '{collection}' in {folder} has no documents; add some with `ragkv ingest`" in done.err
    assert not (tmp_path / "none").exists()


def test_an_ingest_measures_nothing_that_only_questions_need(ragkv: Program, tmp_path: Path) -> None:
    (tmp_path / "line.txt").write_text(LINES[0]["text"])
    where = ("--data", tmp_path / "d", "--device", "cpu")
    assert ragkv("ingest", tmp_path / "line.txt", *where).code == 0
    assert not (tmp_path / "d" / "costs").exists()
    assert ragkv("ask", QUESTION, *where).code == 0
    assert (tmp_path / "d" / "costs").is_dir()


def test_nothing_to_ingest_is_a_failure_that_needs_no_model(ragkv: Program, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = ragkv("ingest", tmp_path / "empty", "--data", tmp_path / "d", "--model", "/no/such/model")
    assert done.code == 1
    assert is_one_line(done.err)
    assert "empty" in done.err


def test_removing_what_is_not_there_is_exit_1(ragkv: Program, data: Path) -> None:
    done = ragkv("rm", "nobody", "--data", data)
    assert done.code == 1
    assert is_one_line(done.err)
    assert "nobody" in done.err


def test_a_document_that_failed_or_waits_is_removed_from_the_queue(ragkv: Program, tmp_path: Path) -> None:
    catalog = Catalog.open(tmp_path / "catalog.sqlite")
    jobs = Jobs(catalog, 1000)
    job_id = jobs.submit([Document("blank", "", " "), Document("waiting", "", "Words.")])
    for name in ("blank", "waiting"):
        assert ragkv("rm", name, "--data", tmp_path).out == f"removed {name}\n"
        assert ragkv("rm", name, "--data", tmp_path).code == 1, "it is gone"
    assert [document.status for document in jobs.get(job_id).documents] == ["cancelled", "cancelled"]
    assert jobs.get(job_id).finished
    catalog.close()


def test_listing_a_folder_that_does_not_exist_makes_nothing(ragkv: Program, tmp_path: Path) -> None:
    done = ragkv("ls", "--data", tmp_path / "none")
    assert (done.code, done.out) == (0, "")
    assert not (tmp_path / "none").exists()


# Questions


def test_a_named_policy_is_reported_with_what_it_read(ragkv: Program, data: Path) -> None:
    asked = "ask", "What was built or painted?", "--data", data, "--method", "reuse", "--max-tokens", "4"
    named = "--prefill", "critiprefill:segment=16,block=8,budget=8,skip=0", "--decode", "topk:count=1,block=8"
    report = json.loads(ragkv(*asked, *named, "--json").out)["report"]
    assert (report["prefill"], report["decode"]) == ("critiprefill", "topk")
    assert 0 < report["prefilling"]["pairs_read"] < report["prefilling"]["pairs_dense"]
    assert report["prefilling"]["why_dense"] == report["decoding"]["why_dense"] == ""
    assert report["decoding"]["read"] < report["decoding"]["present"]
    shown = " ".join(ragkv(*asked, *named).out.split())
    assert (
        f"critiprefill read {report['prefilling']['pairs_read'] / report['prefilling']['pairs_dense']:.0%} of" in shown
    )
    assert f"topk read {report['decoding']['read']:.0f} of {report['decoding']['present']:.0f} keys" in shown
    plain = json.loads(ragkv(*asked, "--json").out)["report"]
    assert (plain["prefill"], plain["decode"]) == ("dense", "dense")
    assert plain["prefilling"]["pairs_read"] is None
    assert plain["prefilling"]["why_dense"].startswith("auto: ")
    assert plain["decoding"]["why_dense"].startswith("auto: ")


def test_json_answers_are_one_object_with_the_whole_report(ragkv: Program, data: Path) -> None:
    done = ragkv("ask", QUESTION, "--data", data, "--json", "--top-k", "1", "--method", "full", "--max-tokens", "4")
    answer = json.loads(done.out)
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
    assert list(answer) == ["question", "answer", "citations", "report"]
    assert [citation["document_id"] for citation in answer["citations"]] == ["harbour"]
    assert (answer["report"]["method"], len(answer["report"]["chunks"])) == ("full", 1)
    assert answer["report"]["tokens"]["generated"] <= 4


def test_a_file_of_questions_ends_with_its_scores(ragkv: Program, data: Path, tmp_path: Path) -> None:
    asked = [{"q": QUESTION, "a": ["Ada Brook", "Brook"]}, {"q": " ", "a": ["x"]}, {"q": "What was painted?", "id": 7}]
    file = tmp_path / "q.jsonl"
    file.write_text("\n\n".join(map(json.dumps, asked)), encoding="utf-8")
    done = ragkv("ask", "--file", file, "--data", data, "--json")
    first, second, summary = map(json.loads, done.out.splitlines())
    em = float(first["answer"].strip(".") in ("Ada Brook", "Brook"))
    assert done.code == 1
    assert is_one_line(done.err)
    assert f"{file}:3" in done.err
    assert (first["question"], second["question"]) == (QUESTION, "What was painted?")
    assert summary["summary"]["questions"] == 2
    assert summary["summary"]["em"] == em / 2
    assert 0 <= summary["summary"]["em"] <= summary["summary"]["f1"] <= 0.5


def test_a_conversation_goes_on_from_one_command_to_the_next(ragkv: Program, data: Path) -> None:
    asked = ("--data", data, "--conversation", "talk", "--method", "full", "--top-k", "1", "--max-tokens", "2")
    first = json.loads(ragkv("ask", QUESTION, *asked, "--json").out)["report"]
    second = json.loads(ragkv("ask", "What was painted?", *asked, "--json").out)["report"]
    assert [len(report["chunks"]) for report in (first, second)] == [1, 2]
    assert second["tokens"]["prefilled"] > first["tokens"]["prefilled"], "another process reads it again"
    done = ragkv("ask", QUESTION, "--data", data, "--conversation", "")
    assert (done.code, is_one_line(done.err), "printable" in done.err) == (1, True, True)
    catalog = Catalog.open(data / "catalog.sqlite")
    catalog.remove_conversation("default", "talk")
    catalog.close()


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (["tags=sea"], {"harbour"}),
        (["tags=sea", "tags=land"], {"harbour", "bridge"}),
        (["tags=sea", "year=1889"], {"harbour"}),
        (["year=1931"], {"bridge"}),
        (["tags=sea", "year=1931"], None),
    ],
)
def test_a_filter_leaves_the_documents_whose_metadata_says_so(
    ragkv: Program, data: Path, filters: list[str], found: set[str] | None
) -> None:
    given = [part for each in filters for part in ("--filter", each)]
    done = ragkv("ask", "What was built or painted?", *given, "--data", data, "--json", "--max-tokens", "1")
    if found is None:
        assert (done.code, is_one_line(done.err), "filter" in done.err) == (1, True, True)
    else:
        assert {chunk["document_id"] for chunk in json.loads(done.out)["report"]["chunks"]} == found


def test_a_filter_that_is_none_is_exit_2(ragkv: Program, tmp_path: Path) -> None:
    for given in ("tags", "=sea"):
        done = ragkv("ask", QUESTION, "--filter", given, "--data", tmp_path, "--model", "/no/such/model")
        assert (done.code, is_one_line(done.err), "KEY=VALUE" in done.err) == (2, True, True)


def test_without_gold_answers_there_is_no_summary(ragkv: Program, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"q": QUESTION}), encoding="utf-8")
    done = ragkv("ask", "--file", file, "--data", data, "--json", "--max-tokens", "1")
    assert (done.code, [*json.loads(done.out)][:2]) == (0, ["question", "answer"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", ":1:"),
        (b'\n{"a": []}', ":2:"),
        (b'{"q": 5}', ":1:"),
        (b'{"q": "x", "a": [1]}', ":1:"),
        (b"\xff", "UTF-8"),
    ],
)
def test_a_bad_question_file_names_the_line(ragkv: Program, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "q.jsonl").write_bytes(content)
    done = ragkv("ask", "--file", tmp_path / "q.jsonl", "--data", tmp_path / "d", "--model", "/no/such/model")
    assert done.code == 1
    assert is_one_line(done.err)
    assert words in done.err


def test_a_schema_gives_an_answer_that_follows_it(ragkv: Program, data: Path, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"builder": {"type": "string"}}, "required": ["builder"]}
    schema["additionalProperties"] = False
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    done = ragkv("ask", QUESTION, "--schema", tmp_path / "schema.json", "--data", data)
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out.splitlines()[0]).keys() == {"builder"}


@pytest.mark.parametrize(
    ("content", "words"), [("{", "not JSON"), ("[]", "a JSON schema is an object"), (None, "No such")]
)
def test_a_file_that_is_no_schema_is_named_before_a_model_is_loaded(
    ragkv: Program, tmp_path: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "schema.json").write_text(content)
    done = ragkv("ask", QUESTION, "--schema", tmp_path / "schema.json", "--model", "/no/such/model")
    assert done.code == 1
    assert "schema.json: " in done.err
    assert words in done.err


def test_answers_for_people_show_citations_and_what_was_reused(ragkv: Program, data: Path) -> None:
    done = ragkv("ask", QUESTION, "--data", data)
    assert (done.code, done.err) == (0, "")
    assert "[1] Tarn" in done.out
    assert "2 of 2 chunks from cache" in done.out
    assert "first token" in done.out
    assert "\x1b" not in done.out


@pytest.mark.parametrize(
    "arguments",
    [[" "], ["\0"], ["who?", "--collection", "nothing"], ["\udcff"], ["who is it " * 3500]],
    ids=["blank", "NUL", "empty collection", "not UTF-8", "too long"],
)
def test_a_question_that_cannot_be_answered_is_exit_1(ragkv: Program, data: Path, arguments: list[str]) -> None:
    done = ragkv("ask", *arguments, "--data", data)
    assert (done.code, done.out) == (1, "")
    assert is_one_line(done.err)


def test_an_unknown_method_lists_the_known_ones(ragkv: Program, data: Path) -> None:
    done = ragkv("ask", QUESTION, "--data", data, "--method", "magic")
    assert done.code == 2
    assert is_one_line(done.err)
    assert all(name in done.err for name in ("full", "samkv-fusion", "scout"))


def test_a_document_cannot_drive_the_terminal(ragkv: Program, tmp_path: Path) -> None:
    line = {"id": "evil", "title": "\x1b[31mred", "text": "The harbour of Tarn was built by Ada Brook."}
    (tmp_path / "evil.jsonl").write_text(json.dumps(line), encoding="utf-8")
    outputs = [
        ragkv("ingest", tmp_path / "evil.jsonl", "--data", with_records(tmp_path / "d")),
        ragkv("ls", "--data", tmp_path / "d"),
        ragkv("ask", QUESTION, "--data", tmp_path / "d", "--max-tokens", "1"),
    ]
    assert "red" in outputs[1].out
    assert not any(letter in done.out + done.err for done in outputs for letter in "\x1b\x07")


# Doctor


def test_the_doctor_finds_nothing_wrong_where_nothing_is(ragkv: Program, data: Path) -> None:
    done = ragkv("doctor", "--data", data)
    assert (done.code, done.err) == (0, "")
    assert all(
        words in done.out
        for words in ("LlamaForCausalLM", "2 documents, 2 chunks", "all 2 chunks have", "fresh", "reuse      qualified")
    )
    assert "family     Llama: tested; answers are measured" in done.out


def test_the_doctor_says_what_a_models_layers_mean(
    ragkv: Program, tmp_path: Path, model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = families.model("gemma3_text")
    other = DecoderModel(families.weights("gemma3_text"), model.tokenizer, windows.profile, "gemma")
    monkeypatch.setattr(DecoderModel, "load", lambda *_: other)
    done = ragkv("doctor", "--data", tmp_path)
    assert "family     Gemma 3: tested; answers are measured" in done.out
    assert "run by their own forward, without recorded graphs and pool; 5 of 6 see the last 8 tokens; " in done.out
    assert "sparse policies act in 1 of 6 layers" in done.out


def test_the_doctor_says_why_a_model_must_not_reuse(
    ragkv: Program, data: Path, model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecoderModel, "load", lambda *_: broken(Relative, model))
    done = ragkv("doctor", "--data", data)
    assert done.code == 1
    assert "wrong reuse" in done.out
    assert "model not qualified: stored KV from a prefill differs by" in done.out


def test_the_doctor_lists_chunks_without_kv(ragkv: Program, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(LINES[0]), encoding="utf-8")
    with redis_server() as server:
        ragkv("ingest", tmp_path / "one.jsonl", "--data", with_records(tmp_path / "d"), "--store", server.url)
    down = ragkv("doctor", "--data", tmp_path / "d", "--store", server.url)
    empty = ragkv("doctor", "--data", tmp_path / "d")
    assert down.code == 1
    assert "wrong store" in down.out
    assert "1 documents, 1 chunks" in down.out
    assert empty.code == 0
    assert "default/harbour#0" in empty.out


def test_the_doctor_says_what_an_unknown_model_is_missing(
    ragkv: Program, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGKV_THREAD", "1")
    done = ragkv("doctor", "--data", data, "--model", "/no/such/model")
    assert (done.code, done.err) == (1, "")
    assert "/no/such/model" in done.out
    assert "2 documents, 2 chunks" in done.out
    assert "RAGKV_THREAD is no setting and has no effect; did you mean RAGKV_THREADS?" in done.out


def test_the_doctor_lists_what_was_set_aside_and_removes_it(ragkv: Program, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    catalog = Catalog.open(tmp_path / "d" / "catalog.sqlite")
    job_id = Jobs(catalog, 1000).submit([Document("deadly", "deadly", "text"), Document("good", "good", "text")])
    with catalog.write() as transaction:  # as two deaths left it
        transaction.exec_driver_sql("UPDATE job_documents SET attempts = 2, status = 'running' WHERE id = 'deadly'")
    assert Jobs(catalog, 1000).recover() == 0
    catalog.close()
    options = ("doctor", "--data", tmp_path / "d", "--model", "/no/such/model", "--device", "cpu")
    listed, removed, later = ragkv(*options), ragkv(*options, "--forget-set-aside"), ragkv(*options)
    for words in ("'deadly'", "'default'", job_id, "the process died 2 times", "--forget-set-aside"):
        assert words in listed.out, words
    assert "good" not in listed.out
    assert "1 removed" in removed.out
    assert "set aside" not in later.out
    elsewhere = ragkv("doctor", "--url", "http://127.0.0.1:1", "--forget-set-aside")
    assert elsewhere.code == 1
    assert is_one_line(elsewhere.err)


def test_lines_over_the_limits_are_refused_and_the_others_are_ingested(ragkv: Program, tmp_path: Path) -> None:
    deep = f'{{"id": "deep", "text": "x", "metadata": {{"a": {"[" * 982}{"]" * 982}}}}}'
    long = json.dumps({"id": "long", "text": "x", "title": "x" * 600})
    (tmp_path / "lines.jsonl").write_text("\n".join([deep, json.dumps(LINES[0]), long]))
    done = ragkv("ingest", tmp_path / "lines.jsonl", "--data", with_records(tmp_path / "d"), "--device", "cpu")
    assert done.code == 1
    assert "line 1" in done.out + done.err
    assert "line 3" in done.out + done.err
    listed = ragkv("ls", "--data", tmp_path / "d")
    assert "harbour" in listed.out
    assert "deep" not in listed.out


def test_the_doctor_shows_no_password(ragkv: Program, tmp_path: Path) -> None:
    done = ragkv("doctor", "--data", tmp_path / "d", "--store", "redis://user:geheim@127.0.0.1:1/0")
    assert done.code == 1
    assert "geheim" not in done.out + done.err


def test_the_doctor_shows_no_secret_and_finds_nothing_of_another_ones(
    ragkv: Program, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGKV_STORE_SECRET", "geheim und lang genug")
    done = ragkv("doctor", "--data", data)
    assert "geheim" not in done.out + done.err
    assert "store_secret = **********" in done.out
    assert "2 of 2 chunks have no KV" in done.out
    assert "ragkv reindex" in done.out


# Processes

IMPORTED = """
import sys
from ragkv.cli import app, run
code = run(sys.argv[1:])
heavy = {"torch", "transformers", "faiss", "fastapi", "sentence_transformers", "redis"} & set(sys.modules)
print(code, sorted(heavy), file=sys.stderr)
"""


def test_help_loads_no_heavy_library(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORTED, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "0 []\n"


def test_listing_loads_no_model(data: Path) -> None:
    command = [sys.executable, "-c", IMPORTED, "ls", "--data", str(data)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "0 []\n"
    assert done.stdout.splitlines()[1].startswith("bridge\tMell\t")


def test_an_interrupt_is_one_line_at_most_and_exit_130(data: Path, tmp_path: Path, interruptible: None) -> None:
    text = "\n\n".join(f"Line {n} of a long tale." for n in range(20_000))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    arguments = ("ingest", "long.txt", "--data", str(tmp_path / "d"))
    with forked(arguments, tmp_path, os.environ, tmp_path / "out") as process:
        while not (tmp_path / "d" / "catalog.sqlite").exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        told = process.stderr.read()  # of the ingest, if it had begun
        assert told in ("", "ragkv: stopped; what was read is kept. Run the same command again to go on\n")
        assert (tmp_path / "out").read_text() == ""


def test_a_reader_that_closes_the_pipe_is_no_traceback(data: Path, tmp_path: Path) -> None:
    with program(["ls", "--data", data], tmp_path) as process:
        process.stdout.close()
        process.wait(60)
        err = process.stderr.read()
    assert "Traceback" not in err


def on_a_terminal(columns: int, *words: str) -> str:
    """What a command shows on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ragkv.cli", *words],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns)},
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    process.communicate(timeout=60)
    assert process.returncode == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())


def test_on_a_terminal_there_is_a_table(data: Path) -> None:
    shown = on_a_terminal(100, "ls", "--data", str(data))
    assert "collection" in shown
    assert "─" in shown


def test_a_narrow_table_cuts_titles_and_no_ids(ragkv: Program, tmp_path: Path) -> None:
    title, id = "A title that is much longer than a terminal has room for", "folder/with-a-rather-long-name.md"
    (tmp_path / "one.jsonl").write_text(json.dumps({"id": id, "title": title, "text": "text"}), encoding="utf-8")
    assert ragkv("ingest", tmp_path / "one.jsonl", "--data", with_records(tmp_path)).code == 0
    shown = on_a_terminal(80, "ls", "--data", str(tmp_path))
    assert id in shown
    assert title not in shown
    assert "A title" in shown


def test_help_is_grouped_and_every_command_fits_on_a_line_of_80_columns() -> None:
    shown = on_a_terminal(80, "--help")
    for panel in ("Everyday", "Service", "Maintenance"):
        assert f"╭─ {panel} ─" in shown
    commands = get_command(app).commands  # type: ignore[attr-defined]
    rows = [line for line in shown.splitlines() if re.match(r"│ [a-z]+ {2,}[A-Z].*\.\s+│", line)]
    assert sorted(line.split()[1] for line in rows) == sorted(commands)


@pytest.mark.parametrize(("typed", "offered"), [("ragkv in", ["ingest"]), ("ragkv re", ["reindex", "restore"])])
def test_a_shell_completes_commands(typed: str, offered: list[str]) -> None:
    asked = {"_RAGKV_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "ragkv.cli"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, sorted(done.stdout.split())) == (0, offered)


def test_the_service_serves_and_sigterm_ends_it_with_exit_0(data: Path, tmp_path: Path) -> None:
    with served(tmp_path, ("serve", "--data", str(data), "--port", "0")) as (process, client):
        health = client.get("/healthz").json()
        process.send_signal(signal.SIGTERM)
        code, err = process.wait(30), process.stderr.read()
    assert (health["status"], health["documents"]) == ("ok", 2)
    assert (code, (tmp_path / "log").read_text(), err) == (0, "", "stopped\n"), "a look at its health is no line"


def test_an_address_that_is_taken_is_told_before_a_model_is_loaded(ragkv: Program, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = ragkv("serve", "--port", other.getsockname()[1], "--data", tmp_path / "d")
    assert done.code == 2
    assert is_one_line(done.err)


def test_listening_beyond_this_machine_is_warned_about(ragkv: Program, tmp_path: Path) -> None:
    done = ragkv("serve", "--host", "0.0.0.0", "--port", "0", "--data", tmp_path, "--model", tmp_path)
    assert done.code == 2
    assert "WARNING" in done.err
    assert "no API keys" in done.err


@pytest.mark.parametrize(
    "words",
    [
        ("ingest", "http://user:SECRET@127.0.0.1:1/x"),
        ("ls", "--url", "http://user:SECRET@127.0.0.1:1"),
        ("restore", "http://user:SECRET@127.0.0.1:1/x.tar"),
        ("rm", "http://user:SECRET@127.0.0.1:1/x"),
        ("ask", "Who?", "--store", "foo://user:SECRET@127.0.0.1:1"),
    ],
)
def test_no_refusal_shows_the_password_of_an_address(
    ragkv: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ragkv(*words)
    assert done.code in (1, 2)
    assert done.err
    assert "SECRET" not in done.out + done.err
