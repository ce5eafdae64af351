"""Loading: text becomes documents, other files are rejected by name, and a bad document stops no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.catalog.limits import MAX_DEPTH, MAX_TITLE
from ragkv.errors import InputError, InvalidDocument, TooLarge
from ragkv.ingest.loader import Rejected, checked, load, parse, read
from ragkv.ingest.sandbox import Allowance
from ragkv.ingest.sources import load_locations
from ragkv.normalisation import visible
from ragkv.types import Document
from tests.catalog.test_limits import nested
from tests.ingest.formats.files import docx, paragraph, pdf

LIMIT = 10_000
READABLE = st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffd")
STORABLE = st.text(READABLE, min_size=1).filter(lambda text: visible(text).strip())


def write(folder: Path, **files: bytes | str) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def documents(items: list[Document | Rejected]) -> list[Document]:
    assert not [item for item in items if isinstance(item, Rejected)]
    return [item for item in items if isinstance(item, Document)]


# Formats and titles


def test_characters_that_nobody_sees_are_not_in_what_is_read() -> None:
    text = "# The ware\xadhouse\n\nThe keeper is Ma\u200bthil\u200bde. The \ufb01re exit is behind gate\xa0seven.\n"
    (document,) = parse(text.encode(), "a.md", LIMIT)
    assert document.title == "The warehouse"
    assert document.text == "# The warehouse\n\nThe keeper is Mathilde. The \ufb01re exit is behind gate\xa0seven.\n"
    page = "<meta charset=utf-8><title>Ru&shy;les</title><p>The ware&shy;house keeper is Ka&#8203;tri&#8203;na."
    (document,) = parse(page.encode(), "a.html", LIMIT)
    assert (document.title, document.text) == ("Rules", "The warehouse keeper is Katrina.")
    (document,) = parse(json.dumps({"id": "ki\u200bey", "text": "Mat\xadhilde"}).encode(), "a.jsonl", LIMIT)
    assert (document.id, document.text) == ("kiey", "Mathilde")


def test_pages_begin_where_they_did_without_what_nobody_sees() -> None:
    document = Document("a", "a", "on\xade\n\ntw\u200bo\n\nthree", pages=((0, 1), (6, 2), (12, 3)))
    found = checked(document, LIMIT)
    assert (found.text, found.pages) == ("one\n\ntwo\n\nthree", ((0, 1), (5, 2), (10, 3)))


def test_a_name_composed_in_two_ways_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "Cafe\u0301.txt").write_text("a")
    (document,) = load([tmp_path / "Cafe\u0301.txt"], LIMIT, root=tmp_path)
    assert isinstance(document, Document)
    assert document.id == "Caf\xe9.txt"


@settings(deadline=None)
@given(STORABLE)
def test_utf8_text_comes_through_unchanged_but_for_what_nobody_sees(text: str) -> None:
    (document,) = parse(text.encode(), "notes/a.txt", LIMIT, "mine")
    assert document == Document("notes/a.txt", "a", visible(text), {}, "mine")


def test_a_byte_order_mark_and_windows_line_ends_are_dropped() -> None:
    (document,) = parse("\ufeffone\r\ntwo\rthree\n".encode(), "a.txt", LIMIT)
    assert document.text == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("# The  title #\n\ntext", "The  title"),
        ("intro\n\n## Later heading\n", "Later heading"),
        ("The title\n=========\ntext", "The title"),
        ("Second level\n---\ntext", "Second level"),
        ("---\nauthor: me\n---\n# Real\n", "Real"),
        ("```\n# a comment\n```\n# Real\n", "Real"),
        ("text only\n\n---\n\nmore", "page"),
        ("#hashtag\n", "page"),
        ("#\n\ntext", "page"),
    ],
)
def test_markdown_is_titled_by_its_first_heading(text: str, title: str) -> None:
    (document,) = parse(text.encode(), "docs/page.md", LIMIT)
    assert (document.title, document.text, document.metadata) == (title, text, {"format": "markdown"})


def test_json_lines_are_documents() -> None:
    lines = [
        {"id": "a", "text": "one\r\ntwo", "title": "A", "metadata": {"year": 1999}},
        {"id": "ü/b", "text": "three", "title": None, "unknown": 1},
    ]
    data = "\ufeff" + "\n\n".join(json.dumps(line) for line in lines) + "\r\n"
    assert parse(data.encode(), "many.jsonl", LIMIT, "c") == [
        Document("a", "A", "one\ntwo", {"year": 1999}, "c"),
        Document("ü/b", "ü/b", "three", {}, "c"),
    ]


@pytest.mark.parametrize("name", ["a.rtf", "a", "a.TXT.exe", ".md.zip"])
def test_an_unknown_format_names_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        parse(b"text", name, LIMIT)
    assert str(caught.value).endswith(
        "known: .txt, .md, .jsonl, .html, .htm, .xhtml, .pdf, .docx, .pptx, .xlsx, .epub, .eml, .csv, .tsv"
    )


def test_suffixes_are_known_in_any_case() -> None:
    assert parse(b"# Head", "READ.MD", LIMIT)[0].title == "Head"


# What is not text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"abc\xff", "byte 3 is not UTF-8"),
        (b"ab\xc3", "byte 2 is not UTF-8"),
        ("é".encode() + b"x\0y", "byte 3 is NUL"),
        (b"a\0b\0", "byte 1 is NUL"),
        (b"abc" + bytes(range(1, 9)), "8 control characters from byte 3"),
        (b"\x89PNG\r\n\x1a\n" + os.urandom(500), "byte 0 is not UTF-8"),
        (b"\xed\xa0\x80 half a pair", "byte 0 is not UTF-8"),
        (b"", "is empty"),
        (b" \n\t \xc2\xa0\n", "is empty"),
    ],
)
def test_bytes_that_are_not_text_are_rejected_with_their_offset(data: bytes, said: str) -> None:
    for name in ("a.txt", "a.md"):
        with pytest.raises(InvalidDocument, match=said):
            parse(data, name, LIMIT)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400), st.sampled_from(["a.txt", "a.md", "a.jsonl", "a.bin", "", "\0", "../a.md"]))
def test_any_bytes_cause_an_input_error_at_most(data: bytes, name: str) -> None:
    for item in read(data, name, 200):
        if isinstance(item, Document):
            assert len(item.text.encode()) <= 200
            assert item.text.strip()
            json.dumps(item.text).encode()
        else:
            assert isinstance(item.error, InputError)


LINES = {
    "not json": "is not JSON",
    '{"id": "x"}': '"text" must be a string',
    '{"text": "x"}': '"id" must be a string',
    '{"id": 7, "text": "x"}': '"id" must be a string',
    '{"id": "x", "text": "x", "title": 1}': '"title" must be a string',
    '{"id": "x", "text": "x", "metadata": []}': "is empty|metadata",
    '{"id": "x", "text": "x", "metadata": [1]}': '"metadata" must be an object',
    '{"id": "x", "text": "x", "metadata": {"a": NaN}}': "NaN",
    '{"id": "x", "text": " "}': "is empty",
    '{"id": "", "text": "x"}': "id must be",
    '{"id": "a\\nb", "text": "x"}': "id must be",
    '{"id": "x", "text": "a\\u0000b"}': "byte 1 is NUL",
    '{"id": "x", "text": "\\ud800"}': "surrogate",
    '{"id": "x", "text": "x", "metadata": {"a": "\\ud800"}}': "metadata",
    '{"id": "x", "text": "x", "title": "\\ud800"}': "surrogate",
    "[1, 2]": "not a JSON object",
    "[" * 100_000: "is not JSON|bytes",
    '{"id": "x", "text": ' + "9" * 5000 + "}": "is not JSON|string",
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:60])
def test_a_bad_line_is_rejected_by_number_and_the_others_are_read(line: str) -> None:
    good = '{"id": "%s", "text": "fine"}'
    items = read("\n".join([good % "a", line, good % "b"]).encode(), "many.jsonl", LIMIT)
    rejected = [item for item in items if isinstance(item, Rejected)]
    assert [item.id for item in items if isinstance(item, Document) and item.text == "fine"] == ["a", "b"]
    if line == '{"id": "x", "text": "x", "metadata": []}':
        assert not rejected  # an empty list is as good as no metadata
        return
    assert [item.source for item in rejected] == ["many.jsonl, line 2"]
    assert "line 2" in str(rejected[0].error)
    with pytest.raises(InvalidDocument, match=LINES[line]):
        raise rejected[0].error
    with pytest.raises(InvalidDocument, match="line 2"):
        parse("\n".join([good % "a", line]).encode(), "many.jsonl", LIMIT)


@pytest.mark.parametrize("data", [b"", b"\n\n  \n"])
def test_a_file_without_lines_is_empty(data: bytes) -> None:
    with pytest.raises(InvalidDocument, match="is empty"):
        parse(data, "a.jsonl", LIMIT)


# Limits


@pytest.mark.parametrize("name", ["large.txt", "large.pdf"])
def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of holes: reading it would not end
    (item,) = load([path], LIMIT, root=tmp_path)
    assert isinstance(item, Rejected)
    assert isinstance(item.error, TooLarge)
    assert str(1 << 40) in str(item.error)
    assert str(LIMIT) in str(item.error)


def test_a_limit_is_in_bytes_and_inclusive() -> None:
    assert parse("é".encode() * 50, "a.txt", 100)
    with pytest.raises(TooLarge, match="102 bytes, the limit is 100"):
        parse("é".encode() * 51, "a.txt", 100)


def test_a_line_over_the_limit_stops_no_other() -> None:
    large = json.dumps({"id": "l", "text": "x" * 700_000})
    data = "\n".join(['{"id": "a", "text": "fine"}', large, large, '{"id": "b", "text": "fine"}'])
    items = read(data.encode(), "many.jsonl", 1000)
    assert [item.id for item in items if isinstance(item, Document)] == ["a", "b"]
    rejected = [item for item in items if isinstance(item, Rejected)]
    assert [item.source for item in rejected] == ["many.jsonl, line 2", "many.jsonl, line 3"]
    assert all(isinstance(item.error, TooLarge) for item in rejected)


MEMORY = """
import resource, sys
from pathlib import Path
from ragkv.ingest.loader import load
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(document,) = load([Path(sys.argv[1])], 100 << 20)
print(len(document.text), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_large_text_is_loaded_with_bounded_memory(tmp_path: Path, root: Path) -> None:
    path, size = tmp_path / "large.txt", 50 << 20
    path.write_bytes(b"A plain sentence of fifty bytes, more or less so. \n" * (size // 51))
    command = [sys.executable, "-c", MEMORY, str(path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=True)
    characters, kilobytes = map(int, done.stdout.split())
    assert characters > 0.97 * size  # its lines are joined
    assert kilobytes * 1024 < 6 * size


# Folders, files and ids


def test_folders_are_walked_in_sorted_order(tmp_path: Path) -> None:
    write(
        tmp_path,
        docs__b_dot_txt="b",
        docs__a_dot_md="# A",
        docs__sub__c_dot_jsonl='{"id": "line", "text": "c"}',
        docs__picture_dot_png=b"\x89PNG",
        docs___dot_hidden_dot_txt="h",
        docs___dot_git__x_dot_txt="x",
    )
    items = list(load([tmp_path / "docs"], LIMIT, "mine", root=tmp_path))
    assert [item.id for item in documents(items)] == ["docs/a.md", "docs/b.txt", "line"]
    assert {item.collection for item in documents(items)} == {"mine"}


def test_an_id_does_not_depend_on_how_the_path_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, docs__a_dot_txt="a")
    monkeypatch.chdir(tmp_path)
    ways = [Path("docs"), Path("docs/a.txt"), tmp_path / "docs", Path("docs/../docs/a.txt"), Path("./docs/./a.txt")]
    assert {item.id for way in ways for item in documents(list(load([way], LIMIT)))} == {"docs/a.txt"}


def test_outside_the_root_an_id_begins_at_what_was_named(tmp_path: Path) -> None:
    write(tmp_path, there__docs__a_dot_txt="a", here__x_dot_txt="x")
    for way, name in ((tmp_path / "there" / "docs", "docs/a.txt"), (tmp_path / "there" / "docs" / "a.txt", "a.txt")):
        assert [item.id for item in documents(list(load([way], LIMIT, root=tmp_path / "here")))] == [name]


def test_an_id_used_twice_is_rejected(tmp_path: Path) -> None:
    lines = '{"id": "a", "text": "1"}\n{"id": "a", "text": "2"}'
    write(tmp_path, x__a_dot_jsonl=lines, a__t_dot_txt="1", b__a__t_dot_txt="2")
    items = list(load([tmp_path / "x", tmp_path / "a", tmp_path / "b" / "a"], LIMIT, root=tmp_path / "x"))
    assert [item.id if isinstance(item, Document) else "rejected" for item in items] == [
        "a", "rejected", "a/t.txt", "rejected",
    ]  # fmt: skip


def test_bad_files_stop_no_others(tmp_path: Path) -> None:
    write(tmp_path, a_dot_txt=b"\xff", b_dot_txt="fine", c_dot_txt="", d_dot_pdf="%PDF")
    paths = [tmp_path / name for name in ("none.txt", "a.txt", "b.txt", "c.txt", "d.pdf")]
    items = list(load(paths, LIMIT, root=tmp_path))
    assert [type(item) for item in items] == [Rejected, Rejected, Document, Rejected, Rejected]
    assert "no such file" in str(items[0].error)  # type: ignore[union-attr]


def test_files_of_all_formats_in_a_folder_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        docs__a_dot_html="<title>A page</title><p>a",
        docs__b_dot_pdf=pdf("b", info={"Title": "A paper"}),
        docs__c_dot_DOCX=docx(paragraph("c")),
        docs__d_dot_csv="letter\nd\n",
        docs__e_dot_pdf=b"PK\3\4 no such thing",
        docs__f_dot_txt="f",
    )
    items = list(load([tmp_path / "docs"], LIMIT, "mine", root=tmp_path))
    assert [(item.id, item.title, item.text, item.metadata) for item in items if isinstance(item, Document)] == [
        ("docs/a.html", "A page", "a", {"format": "html"}),
        ("docs/b.pdf", "A paper", "b", {"format": "pdf", "pages": 1}),
        ("docs/c.DOCX", "c", "c", {"format": "docx"}),
        ("docs/d.csv", "d", "letter: d", {"format": "csv", "rows": 1}),
        ("docs/f.txt", "f", "f", {}),
    ]
    rejected = [item for item in items if isinstance(item, Rejected)]
    assert [(item.source, str(item.error)) for item in rejected] == [("docs/e.pdf", "docs/e.pdf: it is no PDF")]


def test_parsing_keeps_its_limits(tmp_path: Path) -> None:
    write(tmp_path, a_dot_html=b"<p>word " * 1_900_000, b_dot_html="<p>b")
    slow, quick = load([tmp_path], 1 << 24, allowed=Allowance(seconds=3.0))
    assert isinstance(slow, Rejected)
    assert "longer than 3 s" in str(slow.error)
    assert isinstance(quick, Document)


def test_documents_are_read_in_several_threads_at_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda n: parse(f"<p>{n}".encode(), f"{n}.html", LIMIT), range(8)))
    assert [(document.id, document.text) for (document,) in read] == [(f"{n}.html", str(n)) for n in range(8)]


def test_a_file_name_that_is_no_text_gets_a_printable_id(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.txt")
    with open(path, "wb") as file:
        file.write(b"text")
    (document,) = documents(list(load([tmp_path], LIMIT, root=tmp_path)))
    assert document.id == "caf\\udce9.txt"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (told,) = load([tmp_path], LIMIT)
    assert isinstance(told, Rejected)
    assert "pipe.txt: it is no regular file" in str(told.error)
    (item,) = load([tmp_path / "pipe.txt"], LIMIT)
    assert isinstance(item, Rejected)


@pytest.mark.parametrize("suffix", [".txt", ".html"])
def test_a_name_is_a_label_and_is_never_opened(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"secret{suffix}").write_text("secret")
    for name in (str(tmp_path / ".." / tmp_path.name / f"secret{suffix}"), f"../../secret{suffix}"):
        (document,) = parse(b"mine", name, LIMIT)
        assert (document.id, document.text) == (name, "mine")
    with pytest.raises(InvalidDocument, match="printable"):
        parse(b"mine", f"a\0b{suffix}", LIMIT)


# Documents that come without a file


@pytest.mark.parametrize(
    "fault",
    [
        {"id": ""}, {"id": "a\0"}, {"id": "x" * 600}, {"collection": " "}, {"collection": "a\tb"}, {"text": "\n"},
        {"text": "a\0"}, {"text": "\udc00"}, {"title": "\ud800"}, {"metadata": {"a": float("inf")}},
        {"metadata": {"a": object()}},
    ],
)  # fmt: skip
def test_a_document_that_cannot_be_stored_is_invalid(fault: dict[str, object]) -> None:
    fields = {"id": "a", "title": "t", "text": "text", "metadata": {}, "collection": "c", **fault}
    with pytest.raises(InvalidDocument):
        checked(Document(**fields), LIMIT)  # type: ignore[arg-type]
    good = Document("a", "", "text")
    assert checked(good, LIMIT) is good


EXCESSES: tuple[dict[str, object], ...] = (
    {"metadata": nested(MAX_DEPTH + 1)},
    {"metadata": nested(600)},
    {"metadata": {str(n): n for n in range(100)}},
    {"metadata": {"a": "x" * 10_000_000}},
    {"title": "x" * 2_000_000},
)


@pytest.mark.parametrize("excess", EXCESSES)
def test_a_line_over_the_limits_is_refused_by_number_wherever_it_comes_from(
    tmp_path: Path, excess: dict[str, object]
) -> None:
    lines = [{"id": "over", "text": "text", **excess}, {"id": "within", "text": "text", "metadata": nested(MAX_DEPTH)}]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    limit = 2**24
    for items in (  # an upload, a folder, and what --ray and `ragkv ingest` read
        list(read(file.read_bytes(), "lines.jsonl", limit)),
        list(load([tmp_path], limit, root=tmp_path)),
        list(load_locations([str(tmp_path)], limit)),
    ):
        refused, document = items
        assert isinstance(refused, Rejected)
        assert refused.source.endswith("lines.jsonl, line 1")
        assert len(str(refused.error)) < 300
        assert isinstance(document, Document)
        assert document.id == "within"


def test_the_title_of_a_file_is_cut_and_its_metadata_fits() -> None:
    (document,) = documents(read(f"# {'word ' * 2000}\n\ntext".encode(), "long.md", 2**20))
    assert (len(document.title), document.title[-1]) == (MAX_TITLE, "…")
    page = f'<html lang="{"x" * 20_000}"><body><p>text</p></body></html>'
    (document,) = documents(read(page.encode(), "page.html", 2**20))
    assert document.metadata == {"format": "html"}


def test_the_pdfs_of_a_folder_come_with_their_bytes(tmp_path: Path) -> None:
    write(tmp_path, **{"a.pdf": pdf("Tea"), "b.PDF": pdf("Cake"), "c.txt": "Milk"})
    found = {document.id: document.file for document in documents(list(load([tmp_path], 10_000, root=tmp_path)))}
    assert found == {"a.pdf": pdf("Tea"), "b.PDF": pdf("Cake"), "c.txt": b""}
