"""OCR of scanned PDFs with the real packages: pages are read and found, and every bound holds."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("rapidocr")
pytest.importorskip("onnxruntime")
import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageFont
from pypdfium2 import PdfDocument

from ragkv.cli import run
from ragkv.config import bundled_models
from ragkv.errors import InvalidDocument
from ragkv.ingest.formats import ocr
from ragkv.ingest.sandbox import Allowance, parse
from tests.api.conftest import serving, settings
from tests.ingest.formats.files import pdf

pytestmark = pytest.mark.integrations

LIMIT = 1 << 22
ALLOWED = Allowance(ocr_pages=5, ocr_seconds=120.0)
A4 = (1240, 1754)
HARBOUR = ("The harbour of Lindmouth", "burned down in 1890.")
KEEPER = ("Captain Orla Venn rebuilt", "the lighthouse in 1893.")
PROSE = "the keeper of the light was born in Lindmouth and his harbour burned down twice that year, so they said"


def drawn(*lines: str, size: tuple[int, int] = A4, pixels: int = 36) -> Image.Image:
    """A picture of lines."""
    picture = Image.new("L", size, 255)
    font = ImageFont.load_default(pixels)
    for number, line in enumerate(lines):
        ImageDraw.Draw(picture).text((100, 100 + number * int(1.7 * pixels)), line, fill=0, font=font)
    return picture


def noise(size: tuple[int, int] = A4) -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 255, size[::-1], dtype=np.uint8))


def scanned(*pictures: Image.Image, dpi: float = 150.0) -> bytes:
    """A PDF with a picture on each page."""
    out = io.BytesIO()
    pictures[0].save(out, "PDF", save_all=True, append_images=pictures[1:], resolution=dpi)
    return out.getvalue()


def mixed(*files: bytes) -> bytes:
    """A PDF with the pages of several."""
    whole, out = PdfDocument.new(), io.BytesIO()
    for file in files:
        whole.import_pages(PdfDocument(file))
    whole.save(out)
    return out.getvalue()


def read(data: bytes, allowed: Allowance = ALLOWED) -> tuple[str, dict[str, object], tuple[tuple[int, int], ...]]:
    _, text, metadata, pages = parse(io.BytesIO(data), ".pdf", LIMIT, allowed)
    return text, dict(metadata), pages


def test_scanned_pages_are_read_and_keep_their_numbers() -> None:
    text, metadata, pages = read(scanned(drawn(*HARBOUR), drawn(*KEEPER)))
    first = "The harbour of Lindmouth burned down in 1890."
    assert text == f"{first}\n\nCaptain Orla Venn rebuilt the lighthouse in 1893."
    assert metadata == {"format": "pdf", "pages": 2, "ocr_pages": [1, 2]}
    assert pages == ((0, 1), (len(first) + 2, 2))


def test_pages_with_text_are_not_drawn_and_scans_between_them_are_in_their_place() -> None:
    text, metadata, pages = read(mixed(pdf("Tea at four."), scanned(drawn(*HARBOUR)), pdf("Cake at five.")))
    assert text == "Tea at four.\n\nThe harbour of Lindmouth burned down in 1890.\n\nCake at five."
    assert metadata == {"format": "pdf", "pages": 3, "ocr_pages": [2]}
    assert [number for _, number in pages] == [1, 2, 3]


def test_small_print_over_the_whole_width_is_read_line_by_line() -> None:
    lines = [f"{number} {PROSE}" for number in range(12)]
    text, _, _ = read(scanned(drawn(*lines, size=(1340, 560), pixels=18)))
    assert text.split("\n") == lines


def test_what_stands_side_by_side_is_one_line() -> None:
    picture = drawn("Total", "Paid")
    for number, amount in enumerate(("4210", "1893")):
        ImageDraw.Draw(picture).text((800, 100 + number * 61), amount, fill=0, font=ImageFont.load_default(36))
    assert read(scanned(picture))[0] == "Total 4210\nPaid 1893"


def test_a_page_that_is_upside_down_is_turned() -> None:
    assert "harbour of Lindmouth" in read(scanned(drawn(*HARBOUR).rotate(180)))[0]


def test_a_page_of_noise_has_no_text_and_stops_no_other() -> None:
    text, metadata, _ = read(scanned(noise(), drawn(*HARBOUR), drawn()))
    assert text == "The harbour of Lindmouth burned down in 1890."
    assert metadata == {"format": "pdf", "pages": 3, "ocr_pages": [2], "unread_pages": [1, 3]}


def test_only_noise_is_refused() -> None:
    with pytest.raises(InvalidDocument, match="there is no text in it; OCR found none"):
        read(scanned(noise()))


@pytest.mark.parametrize(
    "picture",
    [
        drawn("The harbour of Lindmouth", size=(5000, 7000), pixels=300),
        drawn("The harbour of Lindmouth", size=(4000, 300), pixels=80),
        drawn("The harbour of Lindmouth", size=(1500, 1500)),
    ],
    ids=["huge", "wide", "square"],
)
def test_a_page_of_any_shape_is_bounded(picture: Image.Image) -> None:
    data = scanned(picture, dpi=36.0)
    drawn_again = ocr._picture(PdfDocument(data)[0])
    assert drawn_again.shape[0] * drawn_again.shape[1] < 1.02 * ocr.MOST_PIXELS
    assert max(drawn_again.shape) <= ocr.LONGEST_SIDE + 1
    assert read(data)[0] == "The harbour of Lindmouth"


def test_a_strip_is_not_enlarged() -> None:
    strip = scanned(Image.new("L", (14_000, 4), 100), dpi=72.0)
    assert ocr._picture(PdfDocument(strip)[0]).shape == (ocr.SHORTEST_SIDE, ocr.LONGEST_SIDE, 3)
    with pytest.raises(InvalidDocument, match="OCR found none"):
        read(strip)


def test_the_fullest_page_fits_the_usual_memory() -> None:
    lines = [PROSE + PROSE for _ in range(20)]
    text, _, _ = read(scanned(drawn(*lines, size=(2000, 900), pixels=20)))
    assert text.count("lightwas") + text.count("light was") >= 20


def test_what_takes_too_long_is_refused_with_the_setting() -> None:
    started = time.monotonic()
    with pytest.raises(InvalidDocument, match=r"longer than 1 s \(ocr_pages\)"):
        read(scanned(noise(), noise()), Allowance(ocr_pages=5, ocr_seconds=1.0))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("memory", [2**27, 2**28, 2**29])
def test_too_little_memory_is_a_refusal_with_the_setting(memory: int) -> None:
    with pytest.raises(InvalidDocument, match=r"memory.*\(parse_bytes\)"):
        read(scanned(drawn(*HARBOUR)), Allowance(memory=memory, ocr_pages=5))


@pytest.mark.skipif(os.getuid() != 0, reason="an ordinary user runs all other tests so")
def test_no_thread_is_started() -> None:
    """Root may start threads in spite of the limits, so they are counted."""
    program = (
        "import os, sys; from ragkv.ingest.formats.pdf import parse\n"
        "parse(sys.stdin.buffer.read(), 1 << 20, ocr_pages=5); print(len(os.listdir('/proc/self/task')))"
    )
    environment = {
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=scanned(drawn(*HARBOUR)),
        capture_output=True,
        env=environment,
        timeout=100,
    )
    assert done.stdout == b"1\n", done.stderr


def test_this_onnxruntime_reports_to_nobody() -> None:
    """Official builds after 1.28 can report, and hold the address. The requirement ends before them."""
    (library,) = (Path(onnxruntime.__file__).parent / "capi").glob("onnxruntime_pybind11_state*.so")
    assert b"events.data.microsoft.com" not in library.read_bytes()


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine works where no connection can be made."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr("socket.socket.connect", refused)
    monkeypatch.setattr("socket.getaddrinfo", refused)
    page = PdfDocument(scanned(drawn(*HARBOUR)))[0]
    try:
        assert ocr.Reader().read(page) == "\n".join(HARBOUR)
    finally:
        ocr.logging.disable(ocr.logging.NOTSET)


def test_the_command_ingests_a_scan_and_finds_it_with_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scan = tmp_path / "scan.pdf"
    scan.write_bytes(scanned(drawn(*KEEPER), drawn(*HARBOUR)))
    monkeypatch.setenv("RAGKV_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("RAGKV_MODEL", str(bundled_models() / "tiny"))
    assert run(["ingest", str(scan)]) == 1
    assert "RAGKV_OCR=true" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setenv("RAGKV_OCR", "true")
    assert run(["ingest", str(scan)]) == 0
    assert run(["search", "--json", "When did the harbour burn down?"]) == 0
    assert "burned down in 1890" in capsys.readouterr().out


def test_a_service_reads_an_uploaded_scan_and_cites_its_page(tmp_path: Path) -> None:
    with serving(settings(tmp_path, ocr=True, max_document_bytes=LIMIT)) as service:
        files = [("files", ("scan.pdf", scanned(drawn(*KEEPER), drawn(*HARBOUR))))]
        job = service.client.post("/v1/documents?wait=true", files=files).json()
        assert job["status"] == "completed", job
        found = service.post("/v1/search", {"query": "Orla Venn lighthouse", "top_k": 1}).json()["passages"][0]
        assert "Orla Venn" in found["text"]
        assert found["page"] == 1
