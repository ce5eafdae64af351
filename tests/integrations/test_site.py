"""`make docs`: the site is built without a warning, its links lead somewhere, and it loads nothing from other hosts."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.api.dashboard.browser import chromium, tab
from tools.docs_site.__main__ import write

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

NOWHERE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
"""Whoever uses a proxy finds none."""


def build(project: Path) -> subprocess.CompletedProcess[str]:
    """Run what `make docs` runs, in a folder with the configuration and the pages."""
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict"]
    given = {**os.environ, **NOWHERE, "NO_COLOR": "1"}
    return subprocess.run(command, cwd=project, env=given, capture_output=True, text=True, timeout=200, check=False)


def make_project(folder: Path, root: Path) -> Path:
    """Return a folder with the configuration, the pages and the sources that the reference is made of."""
    folder.mkdir()
    shutil.copy(root / "mkdocs.yml", folder)
    for name in ("ragkv", "api", "ingest"):
        (folder / name).symlink_to(root / name)
    write(folder / "build" / "docs-source")
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    project = make_project(tmp_path_factory.mktemp("site") / "project", root)
    done = build(project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stderr
    return project / "build" / "docs"


def attributes(text: str, names: str) -> list[str]:
    """Return the values of attributes in a page."""
    return [a or b for a, b in re.findall(rf'\s(?:{names})=(?:"([^"]*)"|([^\s>"]+))', text)]


def broken(site: Path) -> list[str]:
    """Return the links and pictures of all pages that lead nowhere."""
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    ids = {path: set(attributes(text, "id|name")) for path, text in texts.items()}
    found = []
    for path, text in texts.items():
        for target in attributes(text, "href|src"):
            url = urlsplit(target)
            if url.scheme or url.netloc or path.name == "404.html":
                continue
            there = (path.parent / unquote(url.path)).resolve() if url.path else path
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file() or (url.fragment and unquote(url.fragment) not in ids.get(there, ())):
                found.append(f"{path.relative_to(site)}: {target}")
    return found


def test_every_link_and_picture_of_the_site_leads_somewhere(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) >= 40
    assert not broken(site)
    page = site / "index.html"
    page.write_text(f'{(whole := page.read_text())}<img src="none.svg"><a href="api.html#none">')
    assert broken(site) == ["index.html: none.svg", "index.html: api.html#none"]
    page.write_text(whole)


def test_a_broken_link_fails_the_build(tmp_path: Path, root: Path) -> None:
    project = make_project(tmp_path / "project", root)
    with (project / "build" / "docs-source" / "quickstart.md").open("a") as page:
        page.write("\n[nowhere](nowhere.md)\n")
    assert build(project).returncode != 0


def test_the_reference_shows_the_client_and_the_engine(site: Path) -> None:
    client, engine = ((site / "reference" / f"{name}.html").read_text() for name in ("client", "engine"))
    assert {"ragkv.client.Client.ask", "ragkv.client.AsyncClient.stream"} <= set(attributes(client, "id"))
    assert {"ragkv.engine.engine.Engine.answer", "ragkv.types.AskOptions"} <= set(attributes(engine, "id"))
    assert "Seconds to wait for an answer" in client, "the docstrings are read"


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_browser_loads_every_kind_of_page_from_the_site_alone(address: str) -> None:
    pages = ("index", "concepts", "api", "reference/http", "reference/client", "notebooks/selected", "results/quality")
    with chromium() as browser:
        for name in pages:
            with tab(browser, f"http://{address}/{name}.html") as (page, log):
                page.wait_for_load_state("networkidle")
                pictures = page.evaluate(
                    "[...document.images].filter(each => !each.naturalWidth).map(each => each.src)"
                )
                assert not pictures
            assert log.hosts == {address}, name
            assert not log.faults, name


def test_the_search_finds_a_section(address: str) -> None:
    with chromium() as browser, tab(browser, f"http://{address}/index.html") as (page, log):
        found = page.locator("a").filter(has_text="PSA with contexts in host memory")
        assert found.count() == 0
        page.get_by_role("button", name="Search").first.click()
        page.keyboard.type("contexts in host memory")
        found.first.wait_for(timeout=20_000)
    assert log.hosts == {address}
