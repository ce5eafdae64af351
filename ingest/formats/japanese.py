"""Character sets of Japanese as Windows writes them, with rows (`①`, `髙`) that Python's codecs lack."""

from __future__ import annotations

import re
from collections.abc import Callable


def _euc_of_windows(data: bytes) -> str:
    """Decode EUC-JP with the rows that Windows adds (`①`, `髙`), which Python's codec lacks."""
    return re.sub(rb"\x8e[\xa1-\xdf]|\x8f[\xa1-\xfe]{2}|[\xa1-\xfe]{2}", _shifted, data).decode(
        "cp932", errors="replace"
    )


def _shifted(match: re.Match[bytes]) -> bytes:
    """Return a character of EUC-JP in Shift_JIS."""
    pair = match[0]
    if pair[0] == 0x8E:
        return pair[1:]
    if pair[0] == 0x8F:
        return b"\x81\xac"  # of JIS X 0212, which Shift_JIS lacks: 〓
    row, cell = pair[0] - 0xA1, pair[1] - 0xA1
    lead = 0x81 + row // 2 if row < 62 else 0xC1 + row // 2
    if row % 2:
        return bytes((lead, 0x9F + cell))
    return bytes((lead, 0x40 + cell + (cell >= 63)))


def _iso_2022_of_windows(data: bytes) -> str:
    """Decode ISO-2022-JP with the rows that Windows adds and half-width katakana."""
    first, *parts = data.split(b"\x1b")
    texts = [first.decode("cp932", errors="replace")]
    for part in parts:
        shift, rest = (part[:2], part[2:]) if part[:1] in (b"$", b"(") else (b"", part)
        if shift in (b"$B", b"$@"):
            lines = re.split(rb"([\x00-\x20]+)", rest)
            texts += [_euc_of_windows(bytes(byte | 0x80 if byte > 32 else byte for byte in line)) for line in lines]
        elif shift == b"(I":
            texts.append(bytes(byte | 0x80 if byte > 32 else byte for byte in rest).decode("cp932", errors="replace"))
        else:
            texts.append(rest.decode("cp932", errors="replace"))
    return "".join(texts)


VENDORS: dict[str, Callable[[bytes], str]] = {"euc_windows": _euc_of_windows, "iso2022_windows": _iso_2022_of_windows}
"""Name of a codec → bytes to text."""
