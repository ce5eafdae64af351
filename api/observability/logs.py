"""Logs: every line of `ragkv serve` in one shape, whoever wrote it: ragkv, the server below it, or a warning of Python.

    text    time level logger event name=value …      for people, a line each
    json    {"time", "level", "logger", "event", …}   for programs, an object a line

Lines that belong to a request have its `request_id`, and the `tenant` where there is one, those of the engine's thread
included (account.py).

What users wrote does not get in: questions and documents are in no line, and of an exception stand its kind and the
places it came through, but its words only where they are ours (RagkvError) or the operating system's; others quote what
they choked on. At level debug they are told. Passwords in addresses are left out wherever they stand, and no value can
make a line look like two: JSON escapes, and so does text.
"""

from __future__ import annotations

import io
import json
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name
from structlog.types import EventDict, Processor, WrappedLogger

from api.runtime.request_context import current
from ragkv.errors import RagkvError

Form = Literal["text", "json"]

OURS = ("ragkv", "ingest")
"""Loggers that the level is for; others are heard from warnings on."""
FRAMES = 24
"""Of an exception, the innermost."""
_FIRST = ("time", "level", "logger", "event", "request_id", "tenant")
_NOT_OURS = ("color_message",)  # uvicorn's, for its own formatter
_PASSWORD = re.compile(r"(?<=://)[^/\s]*@")
_PLAIN = re.compile(r"[\w./:{}+-]+", re.ASCII)


class LogFormatter(logging.StreamHandler[TextIO]):
    """A line that cannot be written is lost, and nothing else: no request fails with it, nothing is said elsewhere."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Nobody is told."""


@contextmanager
def written(form: Form, level: str, stream: TextIO) -> Iterator[None]:
    """In here all lines of this process go to `stream`, those of `level` and above."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    handler = LogFormatter(stream)
    handler.setFormatter(formatter(form, words=level == "debug"))
    root, least = logging.getLogger(), logging.getLevelNamesMapping()[level.upper()]
    levels = {root: max(least, logging.WARNING), **{logging.getLogger(name): least for name in OURS}}
    before, handlers, wording = {each: each.level for each in levels}, list(root.handlers), warnings.formatwarning
    _set(levels, [handler])
    logging.captureWarnings(True)
    warnings.formatwarning = _warning
    try:
        yield
    finally:
        warnings.formatwarning = wording
        logging.captureWarnings(False)
        _set(before, handlers)


def _set(levels: Mapping[logging.Logger, int], handlers: Sequence[logging.Handler]) -> None:
    for each, level in levels.items():
        each.setLevel(level)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    for new in handlers:
        root.addHandler(new)


def formatter(form: Form, words: bool = False) -> ProcessorFormatter:
    """How a line is written. words: whether exceptions that are not ours may say theirs."""
    known: list[Processor] = [ExtraAdder(), add_log_level, add_logger_name, _of_request]
    last: Processor = _as_json if form == "json" else _as_text
    shaped: list[Processor] = [_Faults(words), _timed, ProcessorFormatter.remove_processors_meta, _ordered, last]
    return ProcessorFormatter(foreign_pre_chain=known, processors=shaped)


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{category.__name__} at {Path(filename).name}:{lineno}: {message}"


def _of_request(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    account = current()
    named = {"request_id": account.id, "tenant": account.tenant}
    return {**event, **{name: value for name, value in named.items() if value}}


def _timed(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """When it was logged, which is not when it is written."""
    moment = datetime.fromtimestamp(event["_record"].created, UTC)
    return {**event, "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")}


def _ordered(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    first = {name: event[name] for name in _FIRST if name in event}
    rest = {name: value for name, value in event.items() if name not in (*_FIRST, *_NOT_OURS)}
    return {name: _clean(value) for name, value in {**first, **rest}.items()}


class _Faults:
    """In place of a traceback: `exception`, its kinds, outermost first, and `at`, where it came through."""

    def __init__(self, words: bool):
        self._words = words

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        told = event.pop("exc_info", None)
        event.pop("stack_info", None)
        error = told[1] if isinstance(told, tuple) else told
        if not isinstance(error, BaseException):
            return event
        kinds = " from ".join(self._said(each) for each in _chain(error))
        frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
        places = [f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in frames]
        return {**event, "event": str(event["event"]).strip(), "exception": kinds, "at": places}

    def _said(self, error: BaseException) -> str:
        kind = type(error).__name__
        if self._words or isinstance(error, RagkvError):
            return f"{kind}: {error}"
        return f"{kind}: {error.strerror}" if isinstance(error, OSError) and error.strerror else kind


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)


def _clean(value: Any) -> Any:
    if isinstance(value, bool | int | float | None):
        return value
    if isinstance(value, list | tuple):
        return [_clean(each) for each in value]
    return _PASSWORD.sub("***@", str(value))


def _as_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    return json.dumps(dict(event))


def _as_text(logger: WrappedLogger, method: str, event: EventDict) -> str:
    fields = dict(event)
    head = f"{fields.pop('time')} {fields.pop('level'):8} {fields.pop('logger')}  {escaped(str(fields.pop('event')))}"
    return " ".join([head, *(f"{name}={_shown(value)}" for name, value in fields.items())])


def _shown(value: Any) -> str:
    text = " < ".join(reversed(value)) if isinstance(value, list) else str(value)
    return text if _PLAIN.fullmatch(text) else f'"{escaped(text, quote=True)}"'


def escaped(text: str, quote: bool = False) -> str:
    """The text in one line, with nothing in it that a terminal obeys or that is not seen. quote: also inside quotes."""
    text = text.replace("\\", "\\\\").replace('"', '\\"') if quote else text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
