"""Questions of a file, and what is asked of all of them alike."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ragkv.errors import InputError

if TYPE_CHECKING:
    from ragkv.types import Filter, Scalar


@dataclass(frozen=True)
class FileQuestion:
    """A question and its gold answers. place: "FILE:LINE: ", or empty."""

    question: str
    gold: tuple[str, ...] = ()
    place: str = ""


def parse_filter(given: Sequence[str]) -> Filter | None:
    """Parse KEY=VALUE options into a filter.

    A value that is also JSON for a number, true, false or null matches both the string and the JSON value.
    """
    from ragkv.catalog.limits import WHOLE_NUMBERS

    found: dict[str, list[Scalar]] = {}
    for option in given:
        key, equals, value = valid_text(option).partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{option!r} is not KEY=VALUE", param_hint="--filter")
        found.setdefault(key, []).append(value)
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            continue
        # Of more than 64 bits, only the text can be in metadata.
        if (
            read is None
            or (isinstance(read, int) and read in WHOLE_NUMBERS)
            or (isinstance(read, float) and math.isfinite(read))
        ):
            found[key].append(read)
    return found or None


def read_schema(path: Path) -> dict[str, Any]:
    """Return the JSON schema of a file. Raises InputError."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    if not isinstance(schema, dict):
        raise InputError(f"{path}: a JSON schema is an object")
    return schema


def read_questions(path: Path) -> Iterator[FileQuestion]:
    """Questions of a JSON lines file. Raises InputError, which names the line."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        lines = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    if not any(map(str.strip, lines)):
        raise InputError(f"{path}: there are no questions in it")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _parse(line, f"{path}:{number}: ")


def _parse(line: str, place: str) -> FileQuestion:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}not JSON ({error})") from None
    if not isinstance(item, dict) or not isinstance(item.get("q"), str):
        raise InputError(f'{place}a line is {{"q": "question", "a": ["gold answer", …]}}; "q" must be a string')
    gold = item.get("a", [])
    gold = [gold] if isinstance(gold, str) else gold
    if not isinstance(gold, list) or not all(isinstance(alias, str) for alias in gold):
        raise InputError(f'{place}"a" must be a list of strings')
    return FileQuestion(valid_text(item["q"], place), tuple(gold), place)


def valid_text(question: str, place: str = "") -> str:
    """Return the question. Raises InputError if it contains NUL or bytes that are not UTF-8."""
    if "\0" in question or any("\ud800" <= letter <= "\udfff" for letter in question):
        raise InputError(f"{place}the question is not text: it holds NUL or is not UTF-8")
    return question
