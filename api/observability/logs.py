"""Logging: gives every line of `ragkv serve` one format, also those of uvicorn and the warnings of Python.

    text    time level logger event name=value …      for people, one line per event
    json    {"time", "level", "logger", "event", …}   for programs, one object per line

Every line that belongs to a request has its `request_id`, and its `tenant` if there is one. That includes the lines of
the engine thread. Both come from RequestContext (runtime/request_context.py) and not from structlog.contextvars. The
context has to exist anyway, because the engine thread fills in its timer and report after the request began; copies of
two of its fields in structlog's variables would have to be kept in step in every thread. structlog also stays a detail
of this module, which tests/test_architecture.py checks.

Text of users does not reach the log. No line holds a question or a document, and only those of the audit log
(audit.py) hold ids of documents. Of an exception the log holds its type and
the places that it passed through. It holds the message only of our own errors (RagkvError) and of the operating
system's errors, because other messages quote their input. Level debug logs every message. Passwords in addresses are
always removed. No value can make one line look like two: JSON escapes it, and so does the text format.
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

from ragkv.api.observability.audit import AUDIT_LOGGER
from ragkv.api.runtime.request_context import current
from ragkv.errors import RagkvError, without_password

LogFormat = Literal["text", "json"]

OWN_LOGGER = "ragkv"
"""The logger that the configured level applies to. Others log warnings and above."""
FRAMES = 24
"""Innermost frames of an exception that are logged."""
_FIRST = ("time", "level", "logger", "event", "request_id", "tenant")
_DROPPED = ("color_message",)  # uvicorn adds it for its own formatter
_PLAIN = re.compile(r"[\w./:{}+-]+", re.ASCII)


class LogHandler(logging.StreamHandler[TextIO]):
    """Drops a line that cannot be written. No request fails because of it, and nothing is printed elsewhere."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error."""


@contextmanager
def configured_logging(form: LogFormat, level: str, stream: TextIO) -> Iterator[None]:
    """Send all log lines of this process to a stream while the context is open.

    Args:
        form: Format of the lines.
        level: Least level of our own loggers. `debug` also logs the messages of all exceptions.
        stream: Where the lines go.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    handler = LogHandler(stream)
    handler.setFormatter(build_formatter(form, messages=level == "debug"))
    root, least = logging.getLogger(), logging.getLevelNamesMapping()[level.upper()]
    levels = {root: max(least, logging.WARNING), logging.getLogger(OWN_LOGGER): least}
    levels[logging.getLogger(AUDIT_LOGGER)] = logging.INFO
    old_levels, old_handlers, old_format = (
        {log: log.level for log in levels},
        list(root.handlers),
        warnings.formatwarning,
    )
    _configure(levels, [handler])
    logging.captureWarnings(True)
    warnings.formatwarning = _format_warning
    try:
        yield
    finally:
        warnings.formatwarning = old_format
        logging.captureWarnings(False)
        _configure(old_levels, old_handlers)


def _configure(levels: Mapping[logging.Logger, int], handlers: Sequence[logging.Handler]) -> None:
    for log, level in levels.items():
        log.setLevel(level)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    for new in handlers:
        root.addHandler(new)


def build_formatter(form: LogFormat, messages: bool = False) -> ProcessorFormatter:
    """Build the formatter of log lines.

    Args:
        form: Format of the lines.
        messages: Whether exceptions other than our own may show their message.
    """
    before: list[Processor] = [ExtraAdder(), add_log_level, add_logger_name, _add_request]
    render: Processor = _as_json if form == "json" else _as_text
    processors: list[Processor] = [
        _ExceptionSummary(messages),
        _add_time,
        ProcessorFormatter.remove_processors_meta,
        _order_fields,
        render,
    ]
    return ProcessorFormatter(foreign_pre_chain=before, processors=processors)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{category.__name__} at {Path(filename).name}:{lineno}: {message}"


def _add_request(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    context = current()
    fields = {"request_id": context.id, "tenant": context.tenant}
    return {**event, **{name: value for name, value in fields.items() if value}}


def _add_time(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add the time of the log call. The line may be written later."""
    moment = datetime.fromtimestamp(event["_record"].created, UTC)
    return {**event, "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")}


def _order_fields(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    first = {name: event[name] for name in _FIRST if name in event}
    shown = (name for name in event if name not in (*_FIRST, *_DROPPED) and not name.startswith("_"))
    rest = {name: event[name] for name in shown}
    return {name: _clean(value) for name, value in {**first, **rest}.items()}


class _ExceptionSummary:
    """Replaces a traceback by `exception`, the types from the outermost on, and `at`, the places it passed through."""

    def __init__(self, messages: bool):
        self._messages = messages

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        exc_info = event.pop("exc_info", None)
        event.pop("stack_info", None)
        error = exc_info[1] if isinstance(exc_info, tuple) else exc_info
        if not isinstance(error, BaseException):
            return event
        types = " from ".join(self._describe(each) for each in _chain(error))
        frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
        places = [f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in frames]
        return {**event, "event": str(event["event"]).strip(), "exception": types, "at": places}

    def _describe(self, error: BaseException) -> str:
        name = type(error).__name__
        if self._messages or isinstance(error, RagkvError):
            return f"{name}: {error}"
        return f"{name}: {error.strerror}" if isinstance(error, OSError) and error.strerror else name


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        suppressed = following.__suppress_context__
        following = following.__cause__ or (None if suppressed else following.__context__)


def _clean(value: Any) -> Any:
    if isinstance(value, bool | int | float | None):
        return value
    if isinstance(value, list | tuple):
        return [_clean(each) for each in value]
    return without_password(str(value))


def _as_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    return json.dumps(dict(event))


def _as_text(logger: WrappedLogger, method: str, event: EventDict) -> str:
    fields = dict(event)
    message = escape_text(str(fields.pop("event")))
    head = f"{fields.pop('time')} {fields.pop('level'):8} {fields.pop('logger')}  {message}"
    return " ".join([head, *(f"{name}={_format_value(value)}" for name, value in fields.items())])


def _format_value(value: Any) -> str:
    text = " < ".join(reversed(value)) if isinstance(value, list) else str(value)
    return text if _PLAIN.fullmatch(text) else f'"{escape_text(text, quote=True)}"'


def escape_text(text: str, quote: bool = False) -> str:
    """Escape line breaks, terminal control characters and everything else that is not printable.

    Args:
        text: Any text.
        quote: Also escape backslashes and double quotes.
    """
    text = text.replace("\\", "\\\\").replace('"', '\\"') if quote else text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
