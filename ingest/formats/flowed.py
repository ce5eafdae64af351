"""Messages whose lines say where they go on: `format=flowed` (RFC 3676), and text/enriched (RFC 1896)."""

from __future__ import annotations

import re

from ragkv.ingest.paragraphs import quote_of
from ragkv.ingest.wrapping import SIGNATURE, unwrapped

_LINE_ENDS = re.compile(r"\n++")
_MARKS = re.compile(r"<(<)|<param>[^<]{0,999}</param>|</?[a-z][a-z0-9-]{0,59}>", re.IGNORECASE)


def flowed(text: str, delete_spaces: bool = False) -> str:
    """Return a message of format=flowed (RFC 3676): a line that ends in a space goes on in the next one.

    delete_spaces: Whether that space is none of the text (`delsp=yes`).
    """
    lines = text.split("\n")
    if not any(line.endswith(" ") and line not in SIGNATURE for line in lines):
        return unwrapped(text)
    out, parts, depth = list[str](), list[str](), -1
    for line in lines:
        quote = quote_of(line) if line[:1] == ">" else ""
        quoted, bare = quote.count(">"), line[len(quote) :] if quote else line.removeprefix(" ")
        goes_on = bare.endswith(" ") and bare not in SIGNATURE
        if parts and (quoted != depth or bare in SIGNATURE):
            out.append("".join(parts).rstrip())
            parts = []
        if not parts and quoted:
            parts.append("> " * quoted)
        parts.append(bare[:-1] if goes_on and delete_spaces else bare)
        depth = quoted
        if not goes_on:
            out.append("".join(parts))
            parts = []
    return "\n".join([*out, "".join(parts)] if parts else out)


def enriched(text: str) -> str:
    """Return a message of text/enriched without its marks. One line end is a space; of several the first is none."""
    whole = _LINE_ENDS.sub(lambda ends: ends[0][1:] or " ", text)
    return _MARKS.sub(lambda mark: mark[1] or "", whole)
