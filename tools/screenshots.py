"""Draw the pictures of the docs: the dashboard over the sample documents, as SVG. `make screenshots` runs this.

Chromium prints the page as on a screen, and pdftocairo (poppler) converts the print to SVG: sharp at every size, and a
text file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from ragkv.cli.samples import samples_folder
from ragkv.client import Client

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTH = 1100
ASKED = 6
"""Questions for the overview; the last one is asked on the page."""
POINTS_SECONDS = 25
"""Seconds until the charts have a few points."""
ONLY_THE_MAP = ".header, .q-tabs, .ask aside, .composer, .answer-view { display: none } .ask { display: block }"
"""Hides everything but the map."""
FOR_PRINT = (
    ".kvmap pre, .passage blockquote, .q-table__middle { overflow: visible !important; max-height: none !important }"
    " .ask { height: auto !important } .thread, .ask aside { overflow: visible !important }"
    " .cell { border-radius: 0 !important }"
    " .tile .name, .tile .note, .charts .name, .q-table td, .q-table th, .given, .line .note, .range button, .status"
    " { font-size: 13px !important }"
    " .q-table th, .range button, .title, .value, .brand, .q-tab__label { font-weight: 600 !important }"
    " .q-table tbody tr:nth-child(n+5) { display: none }"
    " .q-toggle__thumb::after { box-shadow: none !important; border: 1px solid #9aa0a6 }"
)
"""In a print every letter of a scrollable text has its own clip path, what scrolls ends with the screen, round corners
take more bytes than cells, a shadow is lost with what casts it, and every size of a font brings its own letters."""
_LONG = re.compile(r"matrix\([^)]*\)|\d+\.\d{2,}")
_DEFAULTS = re.compile(
    r"(?:fill-rule:nonzero|fill-opacity:1|stroke-opacity:1|stroke-linecap:butt|stroke-linejoin:miter|stroke:none);"
    r'| clip-rule="nonzero"'
)
_NUMBERS = {"M": 2, "L": 2, "C": 6}
"""Numbers behind each command of a path."""
_CLIP = re.compile(r'<clipPath id="([^"]+)">\s*(.*?)\s*</clipPath>\n?', re.DOTALL)

_LETTER = re.compile(r'<symbol overflow="visible" id="([^"]+)">\s*<path (d="[^"]*"/>)\s*</symbol>')
_LINE = re.compile(r'<use href="[^"]+" x="[^"]+" y="([^"]+)"/>\n(?:<use href="[^"]+" x="[^"]+" y="\1"/>\n){5,}')


@contextmanager
def served(data: Path) -> Iterator[str]:
    """`ragkv serve` on a free port; yields its address."""
    environment = {**os.environ, "RAGKV_DATA": str(data), "RAGKV_URL": ""}
    command = [sys.executable, "-m", "ragkv.cli", "serve", "--port", "0"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        try:
            for line in run.stderr:
                if line.startswith("serving at"):
                    yield line.split()[-1]
                    return
            raise SystemExit("the service ended before it served")
        finally:
            run.terminate()


def shot(page: Page, name: str) -> None:
    """Write the page as SVG."""
    height = page.evaluate("Math.ceil(document.querySelector('.panels').getBoundingClientRect().bottom + scrollY)")
    with tempfile.TemporaryDirectory() as folder:
        printed, drawn = Path(folder) / "page.pdf", Path(folder) / "page.svg"
        page.emulate_media(media="screen")
        page.pdf(path=printed, width=f"{WIDTH}px", height=f"{height}px", print_background=True, page_ranges="1")
        subprocess.run(["pdftocairo", "-svg", printed, drawn], check=True)
        text = compacted(drawn.read_text(encoding="utf-8"))
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / f"{name}.svg").write_text(text, encoding="utf-8")
    print(f"{name}.svg: {len(text) // 1024} KiB")


def compacted(text: str) -> str:
    """Return an SVG of pdftocairo in fewer bytes: rounded, without defaults, each clip path once, letters in groups."""
    text = re.sub(r"^ +", "", text, flags=re.MULTILINE)  # some versions of pdftocairo indent letters
    text = re.sub(r' style="\s*"', "", _DEFAULTS.sub("", _LONG.sub(_rounded, text)))
    text = _LETTER.sub(r'<path id="\1" \2', re.sub(r' d="([^"]*)"', _relative, text))
    text = re.sub(r"rgb\(([\d.]+)%,([\d.]+)%,([\d.]+)%\)", _hexadecimal, text)
    text = text.replace("xlink:href", "href").replace("glyph", "g")
    first: dict[str, str] = {}
    same = {name: first.setdefault(path, name) for name, path in _CLIP.findall(text)}
    text = _CLIP.sub(lambda found: found[0] if same[found[1]] == found[1] else "", text)
    text = re.sub(r"url\(#(clip[^)]+)\)", lambda found: f"url(#{same.get(found[1], found[1])})", text)
    lines, style = list[str](), ""
    for line in text.splitlines():
        if style == line and lines[-1] == "</g>":  # the group before has the same style, and holds letters only
            lines.pop()
            continue
        if line.startswith("<g "):
            style = line if "style=" in line else ""
        elif not line.startswith("<use ") and (line != "</g>" or lines[-1] == "</g>"):
            style = ""
        lines.append(line)
    return _LINE.sub(_line_of_letters, "\n".join(lines) + "\n")


def _line_of_letters(found: re.Match[str]) -> str:
    """Write the height of a line once, in place of once for each of its letters."""
    letters = found[0].replace(f' y="{found[1]}"', "")
    return f'<g transform="translate(0 {found[1]})">\n{letters}</g>\n'


def _hexadecimal(found: re.Match[str]) -> str:
    """Write a colour in hexadecimal digits."""
    return "#" + "".join(f"{round(2.55 * float(share)):02x}" for share in found.groups())


def _relative(found: re.Match[str]) -> str:
    """Write a path in relative coordinates, which are shorter, and without what can be left out."""
    tokens, parts, last = iter(re.findall(r"[A-Z]|-?\d*\.?\d+", found[1])), list[str](), ""
    x = y = start_x = start_y = 0.0
    for command in tokens:
        if command == "Z":
            x, y, last = start_x, start_y, "z"
            parts.append("z")
            continue
        ends = [float(next(tokens)) for _ in range(_NUMBERS[command])]
        steps = "".join(_short(end - (y if at % 2 else x), at > 0) for at, end in enumerate(ends))
        name = command.lower()
        parts.append((name if name != last else "" if steps[0] == "-" else " ") + steps)
        x, y, last = ends[-2], ends[-1], "l" if command == "M" else name
        if command == "M":
            start_x, start_y = x, y
    path = re.sub(r"(?<=\.\d) (?=\.)", "", "".join(parts))  # a second point begins another number
    return f' d="{re.sub(r"(?<=z)m0 0$", "", path)}"'


def _short(step: float, follows: bool) -> str:
    """Write a number with one decimal in as few characters as possible. follows: another number stands before it."""
    text = f"{step:.1f}".removesuffix(".0").replace("0.", ".") if abs(step) < 0.95 else f"{step:.1f}".removesuffix(".0")
    text = "0" if text in ("-0", "") else text
    return f" {text}" if follows and text[0] != "-" else text


def _rounded(found: re.Match[str]) -> str:
    """Round a coordinate; a matrix stays, because its factors are multiplied with coordinates."""
    return found[0] if found[0].startswith("matrix") else f"{float(found[0]):.1f}".removesuffix(".0")


def main() -> None:
    """Ingest, ask, draw."""
    lines = (samples_folder() / "questions.jsonl").read_text().splitlines()
    questions = [json.loads(line)["q"] for line in lines[:ASKED]]
    with tempfile.TemporaryDirectory() as data, served(Path(data)) as url, Client(url) as client:
        client.wait(client.upload(sorted(samples_folder().glob("*.md"))))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": 800})
            page.goto(f"{url}/dashboard")
            page.add_style_tag(content=FOR_PRINT)
            for question in questions[1:]:
                client.ask(question)
                page.wait_for_timeout(1000 * POINTS_SECONDS / ASKED)
            page.wait_for_timeout(1000 * POINTS_SECONDS)
            page.get_by_role("tab", name="Overview").click()
            expect(page.get_by_role("row", name=questions[-1])).to_be_visible()
            page.wait_for_timeout(500)
            shot(page, "overview")
            page.get_by_role("tab", name="Ask").click()
            for question in (questions[2], questions[1], questions[0]):
                page.get_by_role("button", name="New conversation").click()
                page.get_by_label("Question").fill(question)
                page.get_by_role("button", name="Ask", exact=True).click()
                expect(page.get_by_text("Map of the KV blocks")).to_be_visible(timeout=30_000)
            page.get_by_role("button", name="Passage 1").first.click()
            page.wait_for_timeout(500)
            shot(page, "ask")
            page.get_by_role("button", name="Close").click()
            page.get_by_text("Map of the KV blocks").click()
            expect(page.get_by_role("grid")).to_be_visible(timeout=30_000)
            page.wait_for_timeout(500)
            page.add_style_tag(content=ONLY_THE_MAP)
            shot(page, "map")
            browser.close()


def chromium() -> str:
    """Path of an installed browser. Raises SystemExit if there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise SystemExit("there is no Chromium; `make screenshots` installs Debian's")


if __name__ == "__main__":
    main()
