"""The process that parses a document: it ends with all it started, keeps its limits, and is not trusted."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from zlib import compress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import InputError, InvalidDocument, TooLarge
from ragkv.ingest.formats.base import Parsed
from ragkv.ingest.formats.package import UNPACKED_BYTES
from ragkv.ingest.loader import Rejected, read
from ragkv.ingest.sandbox import Allowance, decode_reply, parse, run
from tests.ingest.formats.files import docx, packed, painted, paragraph, pdf, stream
from tests.ingest.formats.packages import cell, epub, pptx, row, shape, xlsx
from tests.ingest.formats.test_docx import BILLION

LIMIT = 1 << 20
SECONDS = 20.0


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a module named `reads` for a child to run. The test writes it."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "reads.py"


def has_ended(pid: int, seconds: float = 5.0) -> bool:
    """Whether the process ends within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # it has ended, and its parent has not waited for it yet
            return True
        time.sleep(0.02)
    return False


STARTS_ANOTHER = """
import os, subprocess, sys, time
from pathlib import Path
other = subprocess.Popen(["sleep", "60"], stdout={stdout})
Path(__file__).with_name("pids").write_text(f"{{os.getpid()}} {{other.pid}}")
{then}
"""


def test_a_child_that_hangs_is_killed_with_all_that_it_started(module: Path) -> None:
    module.write_text(STARTS_ANOTHER.format(stdout="None", then="time.sleep(60)"))
    started = time.monotonic()
    with pytest.raises(InvalidDocument, match=r"took longer than 3 s \(parse_seconds\)"):
        run("reads", [], io.BytesIO(b"x"), 100, 3.0)
    assert time.monotonic() - started < 10
    assert all(has_ended(int(pid)) for pid in module.with_name("pids").read_text().split())


def test_what_a_child_left_behind_does_not_outlive_its_reply(module: Path) -> None:
    module.write_text(STARTS_ANOTHER.format(stdout="subprocess.DEVNULL", then="print('said', end='')"))
    assert run("reads", [], io.BytesIO(b"x"), 100, SECONDS) == b"said"
    assert all(has_ended(int(pid)) for pid in module.with_name("pids").read_text().split())


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed .Segmentation fault"),
        ("import os; os.abort()", "want of memory"),
        ("raise SystemExit(3)", "crashed .code 3"),
        ("1/0", "crashed .code 1"),
        ("", "crashed .code 0"),
    ],
)
def test_a_child_that_dies_is_a_damaged_file(module: Path, code: str, said: str) -> None:
    module.write_text(code)
    with pytest.raises(InvalidDocument, match=said):
        run("reads", [], io.BytesIO(b"x"), 100, SECONDS)


def test_a_child_that_does_not_stop_talking_is_stopped(module: Path) -> None:
    module.write_text("import sys\nwhile True: sys.stdout.write('x' * 4096)")
    with pytest.raises(TooLarge, match="over 100000 bytes"):
        run("reads", [], io.BytesIO(b"x"), 100_000, SECONDS)


def test_a_child_reads_the_file_and_knows_nothing_else(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGKV_STORE_SECRET", "a secret of sixteen")
    module.write_text("import os, sys; print(sorted(os.environ), sys.stdin.read(), sys.argv[1:], os.getcwd())")
    (tmp_path / "file").write_text("content")
    with (tmp_path / "file").open("rb") as file:
        replies = {run("reads", ["a"], data, 1000, SECONDS) for data in (file, io.BytesIO(b"content"))}
    names = sorted({"PYTHONPATH", *(["LC_CTYPE"] if b"LC_CTYPE" in next(iter(replies)) else [])})  # Python's own
    assert replies == {f"{names} content ['a'] /\n".encode()}


CONFINED = """
import os, resource, signal, sys, time
from ragkv.ingest.formats.confine import confine
file = open(sys.argv[2], "ab", buffering=0)
if os.getuid() == 0:
    os.setuid(65534)  # root may start processes whatever its limits are
confine(float(sys.argv[1]), 256 << 20)

def attempt(what):
    try:
        what()
    except (OSError, MemoryError, ValueError) as error:
        return type(error).__name__
    return "done"

def opened():
    return [os.dup(0) for _ in range(99)]

def grown():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

for what in (os.fork, lambda: bytes(300 << 20), lambda: file.write(b'x'), opened, grown):
    print(attempt(what), flush=True)
exec(sys.argv[3])
"""


def confined(root: Path, file: Path, seconds: float, then: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CONFINED, str(seconds), str(file), then]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(root)})


def test_a_confined_process_can_do_nothing_but_reckon_for_a_while(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    # No parent kills these processes: they end by their own limits.
    with (
        confined(root, file, 0.5, "time.sleep(60)") as asleep,
        confined(root, file, 0.5, "signal.alarm(0)\nwhile True: pass") as busy,
    ):
        replies = [process.communicate(timeout=60)[0].split() for process in (asleep, busy)]
    assert replies == 2 * [["BlockingIOError", "MemoryError", "OSError", "OSError", "ValueError"]]
    assert asleep.returncode == -signal.SIGALRM
    assert busy.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
    assert file.read_bytes() == b""


def test_the_process_imports_neither_torch_nor_the_rest_of_ragkv(root: Path) -> None:
    code = (
        "import sys; from ragkv.ingest.formats.__main__ import parser_of\n"
        "for name in ('html', 'pdf', 'docx', 'csv', 'pptx', 'xlsx', 'epub', 'eml'): parser_of(name)\n"
        "print(*{m.split('.')[0] for m in sys.modules}, *(m for m in sys.modules if m.startswith('ragkv.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"pypdfium2", "selectolax", "ragkv.errors"} <= loaded
    assert not loaded & {
        "torch",
        "transformers",
        "pydantic",
        "faiss",
        "numpy",
        "fastapi",
        "ragkv.types",
        "ragkv.config",
    }


# Replies


REPLIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff",
    b"[" * 100_000,
    b'{"kind": "parsed"}',
    b'{"kind": []}',
    b'{"kind": "other", "words": "x"}',
    b'{"kind": "invalid", "words": null}',
    b'{"kind": "parsed", "title": "t", "text": 1, "metadata": {}}',
    b'{"kind": "parsed", "title": "t", "text": "x", "metadata": [1]}',
]


@pytest.mark.parametrize("reply", REPLIES, ids=range(len(REPLIES)))
def test_a_reply_that_is_none_is_a_damaged_file(reply: bytes) -> None:
    with pytest.raises(InvalidDocument, match="in the middle of its reply"):
        decode_reply(reply)


def test_a_fault_is_told_in_the_childs_words() -> None:
    with pytest.raises(TooLarge, match="so large"):
        decode_reply(b'{"kind": "large", "words": "so large"}')


@settings(deadline=None, max_examples=40)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner) | st.lists(inner)
    )
)
def test_a_reply_whose_text_is_no_text_is_refused(value: object) -> None:
    reply = {"kind": "parsed", "title": "t", "text": value, "metadata": value}
    try:
        parsed = decode_reply(json.dumps(reply).encode())
    except InputError:
        return
    assert isinstance(parsed.text, str)
    assert isinstance(parsed.metadata, dict)


# Bombs and hangs


def test_a_file_over_the_limit_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "grown.csv"
    path.write_bytes(b"a,b\n" + b"1,2\n" * 5000)
    with path.open("rb") as file, pytest.raises(TooLarge, match="over 1000 bytes"):
        parse(file, ".csv", 1000)


def test_what_takes_too_long_is_refused() -> None:
    rows = xlsx({"S": "<row/>" * 4_000_000})
    with pytest.raises(InvalidDocument, match="longer than 1 s"):
        parse(io.BytesIO(rows), ".xlsx", LIMIT, Allowance(seconds=1.0))


def test_what_takes_too_much_memory_is_refused() -> None:
    page = b"<p>x</p>" * 250_000
    with pytest.raises(InvalidDocument, match=r"more than 80 MiB of memory \(parse_bytes\)"):
        parse(io.BytesIO(page), ".html", 8 << 20, Allowance(memory=80 << 20))


def test_the_least_allowance_is_enough_for_ordinary_files() -> None:
    least = Allowance(memory=2**27)
    assert parse(io.BytesIO(pdf("Tea")), ".pdf", LIMIT, least).text == "Tea"
    assert parse(io.BytesIO(docx(paragraph("Tea"))), ".docx", LIMIT, least) == Parsed("", "Tea", {"format": "docx"})
    assert parse(io.BytesIO(b"<p>Tea"), ".html", LIMIT, least).text == "Tea"
    assert parse(io.BytesIO(pptx(shape("Tea"))), ".pptx", LIMIT, least).text == "Tea"
    assert parse(io.BytesIO(xlsx({"S": row("Tea")})), ".xlsx", LIMIT, least).text == "## S\n\nTea"
    assert parse(io.BytesIO(epub({"a": "<p>Tea"})), ".epub", LIMIT, least).text == "Tea"
    assert parse(io.BytesIO(b"Subject: Tea\n\nand cake"), ".eml", LIMIT, least).text == "# Tea\n\nand cake"


def bombs() -> dict[str, bytes]:
    """Files of less than LIMIT bytes that mean to be more, by name."""
    spaces = b" " * (80 << 20)
    return {
        "billion.docx": docx("<w:p><w:r><w:t>&j;</w:t></w:r></w:p>", before=BILLION),
        "deflate.docx": docx(f"<w:p><w:r><w:t>{'a' * (40 << 20)}</w:t></w:r></w:p>"),
        "styles.docx": docx("", styles=" " * (UNPACKED_BYTES + 1)),
        "flate.pdf": pdf(packed(spaces)),
        "twice.pdf": pdf(stream(compress(compress(spaces)), b"/Filter [/FlateDecode /FlateDecode]")),
        "painted.pdf": pdf(packed(painted("x" * 1000) * 40_000)),
        "billion.pptx": pptx("<a:t>&j;</a:t>", before=BILLION),
        "deflate.pptx": pptx(shape("a" * (40 << 20))),
        "slides.pptx": pptx(*(shape("a" * (1 << 20)) for _ in range(20))),
        "outside.xlsx": xlsx({"S": ""}, **{"xl/styles.xml": b'<!DOCTYPE l SYSTEM "file:///etc/passwd"><l/>'}),
        "shared.xlsx": xlsx({"S": row(cell(0, kind="s")) * 20_000}, ["<t>" + "a" * 10_000 + "</t>"]),
        "deflate.epub": epub({"a": "<p>" + "a" * (40 << 20)}),
        "nested.eml": b"Subject: x\n"
        + b"".join(b'Content-Type: multipart/mixed; boundary="%d"\n\n--%d\n' % (at, at) for at in range(10_000)),
        "header.csv": b"x" * 300_000 + b",b\n" + b"1,2\n" * 100_000,
    }


RSS = """
import resource, sys
from pathlib import Path
from ragkv.ingest.loader import Rejected, read
from ragkv.ingest.sandbox import Allowance
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sorted(Path(sys.argv[1]).iterdir()):
    (item,) = read(path.read_bytes(), path.name, 1 << 20, allowed=Allowance(seconds=2.0))
    print(path.name, item.error if isinstance(item, Rejected) else f"read {len(item.text)}", sep="|")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_bombs_are_refused_and_the_service_does_not_grow(tmp_path: Path, root: Path) -> None:
    for name, data in bombs().items():
        assert len(data) < LIMIT
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", RSS, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=True)
    *lines, kilobytes = done.stdout.splitlines()
    assert [line.partition("|")[0] for line in lines] == sorted(path.name for path in tmp_path.iterdir())
    for line in lines:
        name, _, words = line.partition("|")
        assert words.startswith(f"{name}: ")
        assert "crashed" not in words
    assert int(kilobytes) * 1024 < 16 * LIMIT


HEADS = {
    ".pdf": b"%PDF-1.7\n",
    ".docx": docx(paragraph("a"))[:200],
    ".html": b"<p>",
    ".pptx": pptx(shape("a"))[:200],
    ".xlsx": xlsx({"S": row("a")})[:200],
    ".epub": epub({"a": "a"})[:200],
    ".eml": b"Subject: a\nContent-Type: ",
    ".csv": b"a,b\n",
    ".tsv": b"",
    ".htm": b"",
    ".xhtml": b"",
}


@settings(deadline=None, max_examples=25)
@given(
    st.binary(max_size=300),
    st.sampled_from([*HEADS]),
    st.booleans(),
    st.sampled_from(["a", "../a", "a\0b", "", "\ud800"]),
)
def test_whatever_comes_under_a_known_suffix_is_a_document_or_rejected(
    data: bytes, suffix: str, headed: bool, stem: str
) -> None:
    for item in read(HEADS[suffix] + data if headed else data, stem + suffix, 2000):
        if isinstance(item, Rejected):
            assert isinstance(item.error, InputError)
        else:
            assert item.text.strip()
            json.dumps([item.title, item.text, dict(item.metadata)]).encode()
