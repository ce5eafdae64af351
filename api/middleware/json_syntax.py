"""How much of a JSON body is syntax: what reading it costs beyond copying its texts.

A text of 16 MiB is read in milliseconds. As many bytes of `[],[],` make millions of values. Their reading and
validation would hold the event loop for seconds, in which nothing else is answered; a thread would not help, because
neither lets another one run. So bodies are limited in both. The count goes along with the chunks of the body, before it
is read as a whole.
"""

from __future__ import annotations

MOST = 512 * 1024
"""Bytes of syntax that a body may have. A thousand documents with sixteen attributes each need about half of it."""
_WHITE_SPACE = b" \t\r\n"


class JsonSyntax:
    """Counts the bytes of a JSON body that are neither in a string nor white space, quotation marks included.

    Attributes:
        count: The bytes so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._inside = False
        self._escape = b""

    def add(self, chunk: bytes) -> None:
        """Go on with the next chunk of the body."""
        data = self._escape + chunk
        escapes = len(data) - len(data.rstrip(b"\\"))
        self._escape = b"\\" * (escapes % 2)
        data = data.removesuffix(self._escape).replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = data.split(b'"')
        outside = b"".join(parts[1 if self._inside else 0 :: 2])
        self.count += len(parts) - 1 + len(outside.translate(None, _WHITE_SPACE))
        self._inside ^= len(parts) % 2 == 0
