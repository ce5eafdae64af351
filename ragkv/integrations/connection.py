"""What the components of all frameworks share: the way to the service, and passages as metadata."""

from __future__ import annotations

import weakref
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ragkv.client import AsyncClient, Client
from ragkv.client.calls import RETRIES, TIMEOUT
from ragkv.passages import Citation, FoundPassage

URL = "http://127.0.0.1:8000"
"""Address of a service that `ragkv serve` started with its defaults."""
KEY = "RAGKV_KEY"
"""Environment variable of the API key."""


@dataclass(frozen=True)
class Connection:
    """How a service is reached.

    Attributes:
        url: Address of the service.
        api_key: API key, if the service requires one.
        timeout: Seconds to wait for an answer, or for the next event of a stream.
        max_retries: How often a request to a busy service is retried.
    """

    url: str = URL
    api_key: str = field(default="", repr=False)
    timeout: float = TIMEOUT
    max_retries: int = RETRIES

    @cached_property
    def client(self) -> Client:
        """The client for all threads. Its connections are closed when nothing refers to this object any more."""
        client = Client(self.url, self.api_key, self.timeout, self.max_retries)
        weakref.finalize(self, client.close)
        return client

    def open(self) -> AsyncClient:
        """Return a new client for the running event loop, to be used in `async with`.

        A component may be used in several loops one after another, and is never told when one ends.
        """
        return AsyncClient(self.url, self.api_key, self.timeout, self.max_retries)


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None. The settings of the service apply to the others."""
    return {name: value for name, value in options.items() if value is not None}


def passage_metadata(passage: FoundPassage | Citation) -> dict[str, Any]:
    """Return all that is known of a passage but its text, as JSON values."""
    metadata = asdict(passage)
    del metadata["text"]
    if "marks" in metadata:
        metadata["marks"] = list(metadata["marks"])
    return metadata
