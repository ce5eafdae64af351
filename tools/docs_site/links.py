"""Links of the pages, as the site needs them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection

OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "models/adapter/README.md": "models/adapter.md",
    "models/tiny/README.md": "models/tiny.md",
}
"""Pages outside of docs/, by their path in the project, and where the site has them."""

_SOURCES = {site: source for source, site in OUTSIDE.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(\s*([^)\s#]+)(#[^)\s]*)?\s*\)")
_CODE = re.compile(r"^```.*?^```|^    .*?$|`[^`\n]*`", re.M | re.S)


def site_links(page: str, text: str, pages: Collection[str]) -> str:
    """Return a page whose links lead to pages of the site. A link to a file that it does not have becomes plain text.

    Args:
        page: Path of the page in the site.
        text: Its Markdown, with links as they are in the project.
        pages: Paths of all pages in the site.
    """
    source = _SOURCES.get(page, f"docs/{page}")

    def rewrite(found: re.Match[str]) -> str:
        picture, label, target, anchor = found.groups(default="")
        if "://" in target or target.startswith("mailto:"):
            return found.group()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        site = OUTSIDE.get(path, path.removeprefix("docs/").replace(".ipynb", ".md"))
        if site not in pages and not path.startswith("docs/"):
            return label
        return f"{picture}[{label}]({posixpath.relpath(site, posixpath.dirname(page) or '.')}{anchor})"

    parts, end = [], 0
    for code in _CODE.finditer(text):  # a link in a code block is an example
        parts += [_LINK.sub(rewrite, text[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, _LINK.sub(rewrite, text[end:])])
