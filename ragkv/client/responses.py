"""Parsing of responses and events, and their errors, for both clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import httpx2
from pydantic import TypeAdapter, ValidationError

from ragkv.client.document_models import RemotePicture
from ragkv.client.job_models import Job
from ragkv.client.models import Cited, Done, Event, Reported, Retrieved, Said
from ragkv.errors import Refused, Unreachable
from ragkv.passages import Citation
from ragkv.report import Answer, Report

T = TypeVar("T")

MAX_WAIT = 30.0
"""Longest wait before a retry, in seconds, whatever the service asks for."""


def parser(kind: type[T]) -> Callable[[httpx2.Response], T]:
    """Return a function that parses the JSON body of a response as `kind`."""
    adapter = TypeAdapter(kind)
    return lambda response: validate(adapter, _json(response))


def member_parser(kind: type[T], name: str) -> Callable[[httpx2.Response], T]:
    """Return a function that parses one member of the JSON object in a response as `kind`."""
    adapter = TypeAdapter(kind)
    return lambda response: validate(adapter, _member(response, name))


def parse_job_id(response: httpx2.Response) -> str:
    """Parse the id of a queued job."""
    return str(_member(response, "job_id"))


def parse_prometheus(response: httpx2.Response) -> str:
    """Return a body in the Prometheus text format. Raises Refused if it is none."""
    media_type = response.headers.get("content-type", "")
    if not media_type.startswith("text/plain"):
        raise unexpected(f"metrics of type {media_type!r}")
    return response.text


def parse_picture(response: httpx2.Response) -> RemotePicture:
    """Parse a page of a document. Raises Refused if it is no picture."""
    if response.headers.get("content-type") != "image/png":
        raise unexpected(f"a page of type {response.headers.get('content-type', '')!r}")
    pages = response.headers.get("x-ragkv-pages", "")
    marked, edges = (
        response.headers.get("x-ragkv-marked") == "true",
        response.headers.get("x-ragkv-mark", "").split(","),
    )
    mark = (int(edges[0]), int(edges[1]), int(edges[2]), int(edges[3])) if _is_box(edges) else None
    return RemotePicture(response.content, marked, int(pages) if pages.isdecimal() else 0, mark)


def _is_box(edges: list[str]) -> bool:
    return len(edges) == 4 and all(edge.isdecimal() for edge in edges)


def ignore_body(response: httpx2.Response) -> None:
    """Parse nothing."""
    return None


def refusal(response: httpx2.Response) -> Refused | None:
    """Return the error that a response reports, or None for a success. The body must have been read."""
    if response.is_success:
        return None
    default = f"the service answered {response.status_code} {response.reason_phrase}"
    return parse_problem(response.text, response.status_code, default, _retry_after(response))


def retry_delay(error: Refused, retries_left: int) -> float | None:
    """Return how many seconds to wait before a retry, or None if the request is not retried.

    What comes with a Retry-After header is retried where the service was busy and has not started the request (429), or
    where the replica that worked on it ended, or a document that its answer was read from changed. Every request may be
    sent twice.
    """
    repeatable = error.status == 429 or error.code in ("replica_lost", "document_changed")
    if not repeatable or error.retry_after is None or retries_left <= 0:
        return None
    return min(error.retry_after, MAX_WAIT)


def unreachable(url: str, error: Exception) -> Unreachable:
    """Return the error that reports a failed connection."""
    reason = str(error) or type(error).__name__
    return Unreachable(f"no answer from {url} ({reason}); is `ragkv serve` running there?")


def parse_event(event: httpx2.ServerSentEvent) -> Event | None:
    """Parse an event of a streamed answer; return None for an unknown kind.

    Raises:
        Refused: The event is `error`.
    """
    if event.event == "error":
        raise parse_problem(event.data, 500, "the answer broke off", None)
    parse = _EVENT_PARSERS.get(event.event)
    return parse(event.json()) if parse else None


def parse_job_event(event: httpx2.ServerSentEvent) -> Job | None:
    """Parse an event of a job; return None for an unknown kind, and where the service stops.

    Raises:
        Refused: The service cannot go on with the job now.
    """
    if event.event == "error":
        problem = parse_problem(event.data, 500, "the job broke off", None)
        if problem.code == "stopping":
            return None
        raise problem
    return validate(_JOB, event.json()) if event.event in ("progress", "done") else None


_JOB = TypeAdapter(Job)
_EVENT_PARSERS: dict[str, Callable[[Any], Event]] = {
    "retrieval": lambda data: validate(TypeAdapter(Retrieved), data),
    "token": lambda data: validate(TypeAdapter(Said), data),
    "citation": lambda data: Cited(validate(TypeAdapter(Citation), data)),
    "report": lambda data: Reported(validate(TypeAdapter(Report), data)),
    "done": lambda data: Done(validate(TypeAdapter(Answer), data)),
}


def _member(response: httpx2.Response, name: str) -> Any:
    data = _json(response)
    if not isinstance(data, dict) or name not in data:
        raise unexpected(f"no {name}")
    return data[name]


def _json(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise unexpected(response.text[:80]) from None


def validate(adapter: TypeAdapter[T], data: Any) -> T:
    """Return data as the type of an adapter.

    Raises:
        Refused: The data is something else.
    """
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise unexpected(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def unexpected(what: str) -> Refused:
    """Return the error that reports a response of another service."""
    message = f"the response is not that of a ragkv service ({what}); is the address right?"
    return Refused(502, "strange", message, None)


def parse_problem(text: str, status: int, default: str, retry_after: float | None) -> Refused:
    """Return the error of a problem+json text, or of OpenAI's. `default` is the message for any other text."""
    try:
        problem = json.loads(text)
    except ValueError:
        problem = None
    problem = problem if isinstance(problem, dict) else {}
    if isinstance(problem.get("error"), dict):
        problem = {"detail": problem["error"].get("message"), "code": problem["error"].get("code")}
    detail = str(problem.get("detail") or default)
    return Refused(int(problem.get("status", status)), str(problem.get("code", "")), detail, retry_after)


def _retry_after(response: httpx2.Response) -> float | None:
    seconds = response.headers.get("retry-after", "")
    return float(seconds) if seconds.isascii() and seconds.isdigit() else None
