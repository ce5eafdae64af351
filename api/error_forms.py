"""Errors in the forms of other APIs, so that their clients show the sentence.

    OpenAI       {"error": {"message", "type", "param", "code"}}
    Anthropic    {"type": "error", "error": {"type", "message"}, "request_id"}
    Ollama       {"error": "the sentence"}

Every other route answers with problem details (errors.py). An invalid request is a 400 in each of these forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class ShownFault(Protocol):
    """What is told of a fault (errors.Fault)."""

    @property
    def status(self) -> int:
        """HTTP status in problem details."""

    @property
    def detail(self) -> str:
        """One sentence for people."""

    @property
    def code(self) -> str:
        """A stable word for programs."""

    @property
    def extra(self) -> Mapping[str, Any]:
        """Further members; `errors` are those of validation."""


ErrorForm = Callable[[ShownFault, str], dict[str, Any]]
"""Builds the body from a fault and the id of the request."""


@dataclass(frozen=True)
class Paths:
    """Paths of one API.

    Attributes:
        exact: Paths.
        prefixes: What further paths start with.
    """

    exact: frozenset[str]
    prefixes: tuple[str, ...] = field(default=())

    def __contains__(self, path: str) -> bool:
        return path in self.exact or path.startswith(self.prefixes)


OPENAI = Paths(
    frozenset({"/v1/models", "/v1/embeddings", "/v1/completions", "/v1/responses"}),
    ("/v1/chat/", "/v1/models/", "/v1/responses/"),
)
ANTHROPIC = Paths(frozenset({"/v1/messages"}), ("/v1/messages/",))
OLLAMA = Paths(frozenset(), ("/api/",))

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def form_of(path: str) -> ErrorForm | None:
    """Return the form of errors at this path; None for problem details."""
    if path in OPENAI:
        return openai_error
    if path in ANTHROPIC:
        return anthropic_error
    return ollama_error if path in OLLAMA else None


def openai_error(fault: ShownFault, request_id: str = "") -> dict[str, Any]:
    """Convert to OpenAI's error object. Its `param` names the invalid field, if there is one."""
    type_ = _OPENAI_TYPES.get(fault.status, "invalid_request_error" if fault.status < 500 else "server_error")
    message, errors = _told(fault), _fields(fault)
    param = errors[0]["at"] if errors else None
    return {"error": {"message": message, "type": type_, "param": param, "code": fault.code}}


def anthropic_error(fault: ShownFault, request_id: str = "") -> dict[str, Any]:
    """Convert to Anthropic's error object."""
    type_ = _ANTHROPIC_TYPES.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")
    return {"type": "error", "error": {"type": type_, "message": _told(fault)}, "request_id": request_id or None}


def ollama_error(fault: ShownFault, request_id: str = "") -> dict[str, Any]:
    """Convert to Ollama's error."""
    return {"error": _told(fault)}


def told_of(errors: Sequence[Mapping[str, str]]) -> str:
    """Join validation errors to a sentence."""
    return "; ".join(f"{each['at']}: {each['message']}" for each in errors[:3])


def _told(fault: ShownFault) -> str:
    """Return the sentence, with the names of fields as the client has them."""
    return told_of(_fields(fault)) or fault.detail


def _fields(fault: ShownFault) -> list[dict[str, str]]:
    return [{**each, "at": str(each["at"]).removeprefix("body.")} for each in fault.extra.get("errors", ())]
