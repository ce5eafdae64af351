"""Bytes to text by the character set that a file declares for them.

Labels are those of the WHATWG Encoding Standard, as browsers and mail programs read them: a label means the superset
that programs write under it, so `gb2312` is GB 18030, `iso-8859-1` is Windows-1252 and `us-ascii` may be UTF-8.
Python's names are known, too. A label that nobody knows, or that is plainly wrong, is no reason to guess: the set is
what the characters show beyond doubt (detection.py), or the text is refused. The same holds for text without a label.
"""

from __future__ import annotations

import codecs
import re
from functools import cache

from ragkv.errors import InvalidDocument
from ragkv.ingest.formats.japanese import VENDORS
from ragkv.ingest.formats.latin import is_western
from ragkv.ingest.text import check_replacements, check_text

BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
WESTERN = "windows-1252"
"""What files without a label are in where they are in no Unicode: programs in Western Europe wrote them."""

_CODECS = {
    "gbk": ("gb18030",),
    "big5": ("big5hkscs", "cp950"),
    "shift_jis": ("cp932", "shift_jis_2004"),
    "euc-kr": ("cp949",),
    "euc-jp": ("euc_jp", "euc_windows", "euc_jis_2004"),
    "iso-2022-jp": ("iso2022_jp", "iso2022_windows", "iso2022_jp_2004", "iso2022_jp_ext"),
    "windows-874": ("cp874",),
    "iso-8859-8-i": ("iso8859_8",),
    "macintosh": ("mac_roman",),
    "x-mac-cyrillic": ("mac_cyrillic",),
    "koi8-u": ("koi8_u",),
}
"""Name in the standard → codecs of Python and of VENDORS. A later one is tried where an earlier one does not fit."""
_BEYOND = {
    **dict.fromkeys(("koi8r",), "koi8-r"),
    **dict.fromkeys(("koi8u",), "koi8-u"),
    **dict.fromkeys(("gb-18030", "gb-18030-2000"), "gb18030"),
    **dict.fromkeys(("hz-gb-2312", "hz-gb2312", "hz"), "hz"),
    **dict.fromkeys(("iso-2022-kr", "csiso2022kr"), "iso2022_kr"),
    **dict.fromkeys(("iso-2022-jp-1", "iso-2022-jp-2", "iso-2022-jp-3", "cp50220", "cp50221"), "iso-2022-jp"),
    **dict.fromkeys(("cp936", "ms936", "windows-936", "euc-cn", "x-euc-cn"), "gbk"),
    **dict.fromkeys(("cp932", "ms932", "windows-932", "shift-jisx0213", "sjis-win"), "shift_jis"),
    **dict.fromkeys(("cp949", "ms949", "uhc", "ksc5601-1987", "ks-c-5601"), "euc-kr"),
    **dict.fromkeys(("cp950", "ms950", "windows-950"), "big5"),
    **dict.fromkeys(("eucjp-ms", "eucjp-win", "eucjp", "cp51932"), "euc-jp"),
    **dict.fromkeys(("mac-ukrainian", "macukrainian", "mac-cyrillic", "maccyrillic"), "x-mac-cyrillic"),
    **dict.fromkeys(("mac-ce", "mac-centraleurope", "mac-centraleurroman"), "mac_latin2"),
    **dict.fromkeys(("mac-icelandic",), "mac_iceland"),
    **dict.fromkeys(("unicode-1-1-utf-7", "unicode-2-0-utf-7", "csutf7"), "utf-7"),
}
"""Labels that the standard does not have, or forbids for fear of scripts, which are not read here."""
_UTF8_TOO = {"ascii", "us-ascii", "ansi_x3.4-1968", "iso646-us", "646"}
"""Labels that programs put on everything; Windows-1252 in the standard."""
_NO_CHARACTERS = {"rot13", "rot-13", "idna", "punycode", "mbcs", "oem", "undefined", "unicode_escape", "string_escape"}
_NO_CHARACTERS |= {"raw_unicode_escape", "palmos", "x-user-defined"}
_CONTROL = re.compile("[\x80-\x9f]")
_WINDOWS = {
    "iso-8859-2": "cp1250",
    "iso-8859-4": "cp1257",
    "iso-8859-5": "cp1251",
    "iso-8859-6": "cp1256",
    "iso-8859-7": "cp1253",
    "iso-8859-8": "cp1255",
    "iso-8859-13": "cp1257",
}
"""What programs of Windows write under a label of ISO 8859; Windows-1252 for all others."""
_NUMBERED = re.compile(r"(?:x-)?(?:(?:windows|win|dos|ibm|ms|cp|ansi)[-_ ]|windows|win)(\d{3,4})")
"""A code page of Windows or DOS, as programs spell its number."""
_SPELLING = re.compile(r"^x-|[-_ .:]")
_UKRAINIAN = str.maketrans("¢∂", "Ґґ")
_RUSSIAN = str.maketrans("╝╬", "ўЎ")
_EURO = str.maketrans("¤", "€")
_NO_CHANCE = 2
"""Bytes of UTF-8 beyond one a character, from which on no text in a set of single bytes is UTF-8 by chance."""
_LEAST_WIDE = 20
"""Bytes of a text in UTF-16 without a mark, at least."""
_DAMAGE = 2
"""Most characters that do not fit a label before it may be wrong, rather than the text damaged."""


def decode(data: bytes, label: str) -> tuple[str, str]:
    """Decode text by the label that its file declares. A few bytes that fit no character become `�`.

    Returns:
        The text, and the character set that its characters show where that is not the one of the label; else empty.

    Raises:
        InvalidDocument: The label is not known or wrong, and the characters do not show their set.
    """
    name = name_of(label)
    if not name:
        return detect(data, f"its character set {label[:40]!r} is not known; save it as UTF-8")
    if name == WESTERN and (not data.isascii() or b"\x1b" in data):
        return _western(data, label)
    text = _decoded(data, name)
    is_narrow = len(text) == len(data) and not data.isascii()
    if is_narrow and (whole := _unlabelled(data)) is not None and len(whole) + _NO_CHANCE <= len(data):
        return whole, "utf-8"
    if text.count("\ufffd") > _DAMAGE and b"\0" not in data:
        if name != "utf-8" and (whole := _unlabelled(data)) is not None:
            return whole, "utf-8"
        if found := _found(data):
            return found
    return _checked(text, name), ""


def _western(data: bytes, label: str) -> tuple[str, str]:
    """Decode text with a label that programs put on what is in any set, as `decode` does."""
    is_ascii = label.strip().lower() in _UTF8_TOO
    if (text := _unlabelled(data)) is not None:
        return text, "" if is_ascii else "utf-8"
    text = _decoded(data, WESTERN)
    if (is_ascii or not is_western(text)) and (found := _found(data)) and found[1] != WESTERN:
        return found
    return _checked(text, WESTERN), ""


def detect(data: bytes, fault: str = "it is not UTF-8 and names no character set; save it as UTF-8") -> tuple[str, str]:
    """Decode text that has no label that is known.

    fault: What to say of text whose set is not sure.

    Returns:
        The text, and its character set; empty for UTF-8.

    Raises:
        InvalidDocument: It is no text, or its characters do not show their set.
    """
    if b"\0" in data:
        raise InvalidDocument(f"byte {data.index(0)} is NUL, this is not text")
    text = _unlabelled(data)
    if text is not None:
        return text, ""
    found = _found(data)
    if found is None:
        raise InvalidDocument(fault)
    return _checked(found[0], found[1]), found[1]


def shown(data: bytes) -> str:
    """Return the character set that the characters of some text show; empty where it is Unicode or not sure."""
    found = None if b"\0" in data else _found(data)
    return found[1] if found else ""


def decode_plain(data: bytes, advice: str) -> tuple[str, str]:
    """Return the text of a plain file, and its character set: UTF-8, UTF-16 with a mark, or what its characters show.

    advice: What to do with a file in another set.

    Raises:
        InvalidDocument: It is in another one, or no text.
    """
    for mark, name in (*BOMS, (b"", _wide(data))):
        if data.startswith(mark) and name:
            text, name = data.removeprefix(mark).decode(name, errors="replace"), name[:6].rstrip("-")
            break
    else:
        try:
            text, name = data.decode(), "utf-8"
        except UnicodeDecodeError as error:
            found = None if b"\0" in data else _found(data)
            if found is None:
                raise InvalidDocument(f"byte {error.start} is not UTF-8 text; {advice}") from None
            text, name = found
        if "\x1b" in text and (japanese := _unlabelled(data)) not in (None, text):
            text, name = str(japanese), "iso-2022-jp"
    check_text(text)
    return _checked(text, name).replace("\r\n", "\n").replace("\r", "\n"), name


def _wide(data: bytes) -> str:
    """Return the form of UTF-16 in which a text without a mark is; empty for none. Most of its letters are Latin."""
    if b"\0" not in data or len(data) < _LEAST_WIDE:
        return ""
    for name, high, low in (("utf-16-le", data[1::2], data[::2]), ("utf-16-be", data[::2], data[1::2])):
        if 2 * high.count(0) > len(high) and 0 not in low:
            return name
    return ""


def _found(data: bytes) -> tuple[str, str] | None:
    """Return text that is in no Unicode, and the character set that its characters show; None where it is not sure."""
    from ragkv.ingest.formats.detection import detected  # most files are UTF-8

    found = None if _is_unicode(data) else detected(data)
    if found is None or found[1]:
        return found
    text = data.decode("cp1252", errors="replace")
    letters = set(text.lower())
    if letters & {*"ðþý"} and letters & {*"çü"} and not letters & {*"áéíóúæ"}:
        return data.decode("cp1254", errors="replace"), "windows-1254"  # of Turkish, for Icelandic has all of the last
    return (text, WESTERN) if is_western(text) else None


def _is_unicode(data: bytes) -> bool:
    """Whether data is UTF-8 but for halves of surrogate pairs, which some programs write."""
    try:
        data.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def name_of(label: str) -> str:
    """Return the name of a character set in the standard, else Python's name of it; empty for an unknown label."""
    plain = label.strip().strip("\"'").lower()
    if plain in ("utf-8", "utf8"):
        return "utf-8"
    import webencodings  # most files are UTF-8 and need no table

    for name in dict.fromkeys((plain, plain.replace("_", "-"), plain.replace("-", "_"))):
        bare = name.removeprefix("x-").removeprefix("x_")
        for form in (name, bare):
            if form in _BEYOND:
                return _BEYOND[form]
            known = webencodings.lookup(form)
            if known is not None and known.name not in ("replacement", "x-user-defined"):
                return str(known.name)
    if numbered := _NUMBERED.fullmatch(plain):
        return name_of(f"{'windows-' if numbered[1].startswith('125') else 'cp'}{numbered[1]}")
    bare = _SPELLING.sub("", plain)
    return _python_name(plain.removeprefix("x-")) or _respelled().get(bare) or _python_name(bare)


@cache
def _respelled() -> dict[str, str]:
    """Return the names of the standard by its labels without signs between letters: `big-5`, `gb 2312`."""
    from webencodings.labels import LABELS

    kept = ((label, name) for label, name in LABELS.items() if name not in ("x-user-defined", "replacement"))
    return {_SPELLING.sub("", label): name for label, name in kept}


def _python_name(label: str) -> str:
    """Return the name of a codec of Python that decodes bytes to text."""
    if label in _NO_CHARACTERS or not label.isascii():
        return ""
    try:
        found = codecs.lookup(label)
        "".encode(found.name)
    except (LookupError, ValueError):
        return ""
    return "" if found.name in _NO_CHARACTERS or "escape" in found.name else found.name


def _decoded(data: bytes, name: str) -> str:
    """Decode data in the first codec that fits, else in the one that fits best."""
    best = ""
    for at, codec in enumerate(_CODECS.get(name, (name,))):
        vendor = VENDORS.get(codec)
        text = vendor(data) if vendor else data.decode(codec, errors="replace")
        left = text.count("\ufffd")
        if not at or left < best.count("\ufffd"):
            best = text
        if not left:
            break
    if name.startswith("iso-8859") and _CONTROL.search(best):
        return _of_windows(data, best, name)
    return _corrected(best, name)


def _of_windows(data: bytes, text: str, name: str) -> str:
    """Return text that its label calls ISO 8859, with the signs that Windows has in place of controls.

    Where these are letters, it is in the set of Windows as a whole.
    """
    codec = _WINDOWS.get(name.removesuffix("-i"), "cp1252")
    signs = {code: bytes((code,)).decode(codec, errors="replace") for code in map(ord, set(_CONTROL.findall(text)))}
    return data.decode(codec, errors="replace") if any(map(str.isalpha, signs.values())) else text.translate(signs)


def _corrected(text: str, name: str) -> str:
    """Put in the few characters in which a codec of Python differs from the standard."""
    if name == "x-mac-cyrillic":
        return text.translate(_UKRAINIAN).translate(_EURO)
    return text.translate(_RUSSIAN) if name == "koi8-u" else text


def _unlabelled(data: bytes) -> str | None:
    """Return text that can be nothing but UTF-8 or ISO-2022-JP; None for any other."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if any(shift in data for shift in (b"\x1b$B", b"\x1b$@", b"\x1b(J")):
        return _decoded(data, "iso-2022-jp")
    return text


def _checked(text: str, name: str) -> str:
    """Return the text if only few of its characters could not be decoded. Raises InvalidDocument."""
    check_replacements(text, f"it is not text in {name}; save it as UTF-8")
    return text
