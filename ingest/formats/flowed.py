"""Messages whose lines say where they go on (`format=flowed`, RFC 3676)."""

from __future__ import annotations

from ragkv.ingest.wrapping import SIGNATURE, unwrapped


def flowed(text: str, delete_spaces: bool = False) -> str:
    """Return a message of format=flowed (RFC 3676): a line that ends in a space goes on in the next one.

    delete_spaces: Whether that space is none of the text (`delsp=yes`).
    """
    lines = text.split("\n")
    if not any(line.endswith(" ") and line not in SIGNATURE for line in lines):
        return unwrapped(text)
    out, parts, depth = list[str](), list[str](), -1
    for line in lines:
        bare = line.lstrip(">")
        quoted, bare = len(line) - len(bare), bare.removeprefix(" ")
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
