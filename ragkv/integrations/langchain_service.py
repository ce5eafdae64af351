"""Fields that LangChain's objects of a ragkv service share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from langchain_core.load import Serializable
from langchain_core.utils import secret_from_env
from pydantic import ConfigDict, Field, SecretStr

from ragkv.client.calls import RETRIES, TIMEOUT
from ragkv.integrations.connection import KEY, URL, Connection, given

FORBID = ConfigDict(extra="forbid")
"""A field that does not exist is an error. LangChain's base classes ignore it, so each class has to say so itself."""


class ServiceFields(Serializable):
    """How a service is reached, and what is searched.

    Attributes:
        url: Address of the service.
        api_key: API key, if the service requires one; by default that of the environment, `RAGKV_KEY`.
        timeout: Seconds to wait for an answer, or for the next event of a stream.
        max_retries: How often a request to a busy service is retried.
        collection: Collection to search.
        top_k: Number of passages; None uses the setting of the service.
        filter: Only documents whose metadata has these values: `{key: value or [values]}`.
    """

    url: str = URL
    api_key: SecretStr = Field(default_factory=secret_from_env(KEY, default=""))
    timeout: float = TIMEOUT
    max_retries: int = RETRIES
    collection: str = "default"
    top_k: int | None = None
    filter: dict[str, Any] | None = None

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return that LangChain can write and load objects of this class."""
        return True

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Fields that are not written, and the names of the environment variables that hold them."""
        return {"api_key": KEY}

    @cached_property
    def connection(self) -> Connection:
        """The way to the service."""
        return Connection(self.url, self.api_key.get_secret_value(), self.timeout, self.max_retries)

    def request_options(self, fields: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a request.

        Args:
            fields: Names of fields that are sent, besides those that every request has.
            options: Options of this request, in place of the fields.
        """
        names = ("collection", "top_k", "filter", *fields)
        return given(**{name: getattr(self, name) for name in names} | dict(options))


class AnswerFields(ServiceFields):
    """How questions are answered; see the HTTP API. None uses the setting of the service.

    Attributes:
        method: Method that builds the context cache, with its parameters.
        prefill: Prefill policy.
        decode: Decode policy.
        max_tokens: Largest number of tokens of the answer.
        deadline_s: Seconds that the answer may take.
        abstain_below: The answer becomes `unknown` where its confidence is lower, 0 to 1.
        speculation: Whether tokens of the answer are drafted from its prompt.
    """

    method: str | None = None
    prefill: str | None = None
    decode: str | None = None
    max_tokens: int | None = None
    deadline_s: float | None = None
    abstain_below: float | None = None
    speculation: bool | None = None

    def request_options(self, fields: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a request. See `ServiceFields.request_options`."""
        return super().request_options((*AnswerFields.__annotations__, *fields), options)
