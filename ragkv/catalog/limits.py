"""What a document may have beside its text. Every way in imports these numbers and checks.

Nothing here recurses: what is nested without end must not exhaust the stack of whoever looks at it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ragkv.passages import MAX_LABEL

MAX_NAME = 512
"""Characters of a document id or a collection name."""
MAX_TITLE = MAX_LABEL
"""Characters of a title. A longer one is refused where a client states it, and cut where a file has it."""
MAX_METADATA_KEYS = 16
MAX_METADATA_BYTES = 16 * 1024
"""Bytes of metadata as JSON."""
WHOLE_NUMBERS = range(-(2**63), 2**63)
"""Whole numbers that metadata may hold: 64 bits, which both databases compare exactly. Larger ones can be texts."""
MAX_DEPTH = 16
"""Levels of lists and objects in metadata, the metadata itself included."""
PRUNED = f"(nested deeper than {MAX_DEPTH} levels)"
"""Stands for what lies deeper in metadata that an earlier release has stored."""

_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
"""A string, whose brackets do not count, or a bracket of JSON."""


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise ValueError where metadata is no JSON object within the limits. The message goes on behind its name."""
    if len(metadata) > MAX_METADATA_KEYS:
        raise ValueError(f"must not have more than {MAX_METADATA_KEYS} keys, has {len(metadata)}")
    if is_deep(metadata):
        raise ValueError(f"must not be nested deeper than {MAX_DEPTH} levels")
    if (large := _large_number(metadata)) is not None:
        raise ValueError(f"must not hold whole numbers of more than 64 bits, such as {large}; send them as text")
    size = _size(metadata)
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"must not be larger than {MAX_METADATA_BYTES} bytes of JSON, is {size}")


def is_deep(value: object, most: int = MAX_DEPTH) -> bool:
    """Whether lists and objects are nested in more than `most` levels."""
    level: list[Any] = [value]
    for _ in range(most):
        level = [child for parent in level for child in _children(parent)]
    return any(isinstance(child, Mapping | list | tuple) for child in level)


def fitting(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what fits of the metadata that a format found in a file: the largest values are left out."""
    kept = {key: value for key, value in metadata.items() if _is_json(key, value)}
    sizes = {key: _size({key: value}) for key, value in kept.items()}
    while kept and (sum(sizes[key] for key in kept) > MAX_METADATA_BYTES or len(kept) > MAX_METADATA_KEYS):
        del kept[max(kept, key=sizes.__getitem__)]
    return kept


def read_metadata(text: str) -> dict[str, Any]:
    """Parse metadata of the catalogue. What lies deeper than MAX_DEPTH, which no release accepts now, is PRUNED."""
    if text.count("[") + text.count("{") > MAX_DEPTH:
        text = _prune(text)
    found: dict[str, Any] = json.loads(text)
    return found


def _prune(text: str) -> str:
    depth, kept, at = 0, list[str](), 0
    for token in _TOKEN.finditer(text):
        mark = text[token.start()]
        if mark in "[{":
            depth += 1
            if depth == MAX_DEPTH + 1:
                kept += [text[at : token.start()], json.dumps(PRUNED)]
        elif mark in "]}":
            if depth == MAX_DEPTH + 1:
                at = token.end()
            depth -= 1
    return "".join([*kept, text[at:]])


def _large_number(metadata: Mapping[str, Any]) -> int | None:
    """Return a whole number that is out of range, in metadata that is not deep."""
    level: list[Any] = [metadata]
    while level:
        for value in level:
            if isinstance(value, int) and value not in WHOLE_NUMBERS:
                return value
        level = [child for parent in level for child in _children(parent)]
    return None


def _children(value: object) -> Any:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _is_json(key: object, value: object) -> bool:
    if not isinstance(key, str) or is_deep(value, MAX_DEPTH - 1) or _large_number({key: value}) is not None:
        return False
    try:
        _size({key: value})
    except ValueError:
        return False
    return True


def _size(metadata: Mapping[str, Any]) -> int:
    """Count the bytes of metadata that is not deep. Raises ValueError if it is not JSON."""
    try:
        return len(json.dumps(dict(metadata), ensure_ascii=False, allow_nan=False).encode())
    except UnicodeEncodeError:
        raise ValueError("must not contain lone surrogates") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"is not JSON: {error}") from None
