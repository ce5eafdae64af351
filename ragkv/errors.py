"""The exception hierarchy. An error says what happened, and what to do next.

The CLI shows `str(error)`: the message, and a hint if there is one. A hint is for whoever runs ragkv: it names commands
and settings. The HTTP API shows `error.public`: clients cannot run commands, and need not know paths and addresses.

RagkvError
├── ConfigError              settings that cannot work                     exit 2
│   ├── ModelNotFound        no such folder, a hub id without network, a damaged GGUF file or adapter
│   ├── ModelUnsupported     what a layer does, rope type, sliding window, or kind of adapter
│   ├── MissingPackage       an optional package is not installed
│   ├── NotCalibrated        the method needs `ragkv calibrate` first
│   ├── EmbedderChanged      the vectors come from another embedder        409
│   └── NoReranker           `POST /v1/rerank` needs RAGKV_RERANKER        409
├── InputError               an invalid request or document                422
│   ├── InvalidDocument      empty, binary, not text                       422
│   ├── TooLarge             over a limit                                  413
│   ├── QuotaExceeded        the document exceeds its collection's quota   413
│   └── InvalidBackup        not a backup, damaged, or of a newer ragkv
├── Forbidden                the caller's role does not allow it           403
├── NotFound                 no such document, collection, job, conversation  404
├── Busy                     the request queue is full                     429
├── Expired                  the answer missed its deadline                504
├── Outdated                 a document that the answer read is gone       503
├── Stopping                 shutting down, accepts no new work            503
├── Restarting               the engine ended unexpectedly, and begins anew  503
├── OutOfMemory              not enough memory for a request               503
├── ServiceError             raised by ragkv.client                        exit 1
│   ├── Refused              the service refused the request
│   └── Unreachable          no connection to the service
├── CatalogCorrupt           the SQLite file is damaged                    exit 2
├── CatalogClosed            the process or its engine ends               503
└── StoreError               the KV store failed; never fails an answer
    ├── StoreUnavailable     down, not responding, or refusing connections
    ├── StoreFull            no space left
    ├── EntryMissing         evicted or never stored
    ├── EntryCorrupt         length, checksum, shape or fingerprint differ
    └── NotQuantisable       values that an int8 or fp8 body cannot represent
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager

_WORDS = re.compile(r"(\s+)")
_PORT = re.compile(r"[0-9]+[/?#]")
_ENDS = re.compile(r"[/?#]")


def without_password(text: str) -> str:
    """Return a text with its addresses, but with `***` for their users and passwords."""
    return "".join(map(_without_users, _WORDS.split(text))) if "@" in text else text


def _without_users(word: str) -> str:
    """Hide the users of all addresses in a word. A path has one slash where the address had two."""
    pieces = word.split(":/")
    shown = pieces[:1]
    for before, piece in itertools.pairwise(pieces):
        rest = piece.removeprefix("/")
        shown.append(piece[: len(piece) - len(rest)] + (_without_user(rest) if before[-1:].isalnum() else rest))
    return ":/".join(shown)


def _without_user(rest: str) -> str:
    """Hide the user of an address without its scheme. A password may hold slashes; a port does not."""
    end = _ENDS.search(rest)
    at = rest.rfind("@", 0, end.start() if end else len(rest))
    if at >= 0:
        return f"***{rest[at:]}"
    name, _, password = rest.partition(":")
    at = password.find("@")
    if at < 0 or _ENDS.search(name) or _PORT.match(password):
        return rest
    return f"***{password[at:]}"


class RagkvError(Exception):
    """Base class of all errors that this project raises on purpose.

    Addresses in them hold no password, wherever they came from.

    Attributes:
        message: What happened.
        hint: What whoever runs ragkv can do about it, "" if that is plain.
    """

    def __init__(self, message: str = "", hint: str = ""):
        self.message, self.hint = without_password(message), without_password(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    @property
    def public(self) -> str:
        """What clients of a service are told."""
        return self.message


class ConfigError(RagkvError):
    """The settings are invalid or cannot be used. The message names paths and addresses, for whoever runs ragkv."""

    @property
    def public(self) -> str:
        """What clients of a service are told."""
        return "the service cannot work as it is set up now; its log has the details"


class ModelNotFound(ConfigError):
    """The model or its adapter cannot be read."""


class ModelUnsupported(ConfigError):
    """The model's layers, rope type or attention window, or its adapter, are not supported."""


class MissingPackage(ConfigError, ImportError):
    """A module needs a package that is optional and not installed. `except ImportError` catches it, too."""


class NotCalibrated(ConfigError):
    """The method needs a profile of the model that `ragkv calibrate` creates."""

    @property
    def public(self) -> str:
        """What clients of a service are told."""
        return self.message


class EmbedderChanged(ConfigError):
    """The stored vectors come from another embedding model."""

    @property
    def public(self) -> str:
        """What clients of a service are told."""
        return f"{self.message}; whoever runs the service has to rebuild the index"


class NoReranker(ConfigError):
    """The service has no reranker."""

    def __init__(self) -> None:
        super().__init__(
            "the service has no reranker", "set RAGKV_RERANKER to the folder or the hub id of a cross-encoder"
        )

    @property
    def public(self) -> str:
        """What clients of a service are told."""
        return f"{self.message}; whoever runs the service has to set RAGKV_RERANKER"


class InputError(RagkvError):
    """The request or document is invalid."""


class InvalidDocument(InputError):
    """The document is empty, binary or cannot be decoded."""


class TooLarge(InputError):
    """The input exceeds a limit. The message names the limit and the size."""


class QuotaExceeded(InputError):
    """The document does not fit into its collection's quota.

    The HTTP status is 413 and not 507: the service has space, but the same request fails again unless it changes.
    """


class InvalidBackup(InputError):
    """The file is not a backup, or it is damaged. Nothing was restored."""


class Forbidden(RagkvError):
    """The role of the caller does not allow the request."""


class NotFound(RagkvError):
    """There is no such document, collection, job or conversation."""


class Busy(RagkvError):
    """The request queue is full.

    Attributes:
        retry_after: Seconds after which a retry is likely to be accepted.
    """

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


class Expired(RagkvError):
    """The deadline of a request passed before its answer was complete."""

    def __init__(self) -> None:
        super().__init__("the answer was not there in time; ask again later, with a longer deadline or for less")


class Outdated(RagkvError):
    """A document that an answer was read from was deleted or replaced before the answer was delivered."""

    def __init__(self) -> None:
        super().__init__("a document that the answer was read from was deleted or replaced meanwhile; ask again")


class OutOfMemory(RagkvError):
    """There is not enough memory for the request or the document. Nothing else failed by that."""

    def __init__(self) -> None:
        super().__init__("there is not enough memory for this now; ask again later, or for less")


class Stopping(RagkvError):
    """The service is shutting down and accepts no new work."""


class Restarting(RagkvError):
    """The engine of the service ended unexpectedly, and another takes its place.

    Attributes:
        retry_after: Seconds after which a retry is likely to be served.
    """

    def __init__(self, retry_after: int):
        super().__init__(f"the engine of the service ended unexpectedly and is replaced; try again in {retry_after} s")
        self.retry_after = retry_after


class ServiceError(RagkvError):
    """A request of a client failed."""


class Refused(ServiceError):
    """The service refused a request.

    Attributes:
        status: HTTP status.
        code: Stable error code for programs; empty if the service sent none.
        retry_after: Seconds after which to retry, or None if the service did not say.
    """

    def __init__(self, status: int, code: str, detail: str, retry_after: float | None = None):
        super().__init__(detail)
        self.status, self.code, self.retry_after = status, code, retry_after


class Unreachable(ServiceError):
    """There is no service at the address, or the connection was lost."""


class CatalogCorrupt(RagkvError):
    """The SQLite catalogue is damaged. It is never replaced automatically; restoring a backup is up to the user."""

    @property
    def public(self) -> str:
        """What clients of a service are told."""
        return "the catalogue of the service is damaged; its log has the details"


class CatalogClosed(RagkvError):
    """The catalogue was closed, because its process ends or its engine has failed."""

    def __init__(self, name: str):
        super().__init__(f"the catalogue {name} is closed")

    @property
    def public(self) -> str:
        """What clients of a service are told."""
        return "the service cannot read its documents now; try again later"


class StoreError(RagkvError):
    """The KV store failed. Such an error makes an answer slower but never fails it.

    Attributes:
        code: The kind of fault, as reports and metrics name it. The message holds paths and addresses, for the log.
    """

    code = "failed"

    @property
    def public(self) -> str:
        """What clients of a service are told."""
        return "the storage of the service does not work now; its log has the details"


class StoreUnavailable(StoreError):
    """The store is down, does not respond, or refuses connections."""

    code = "unavailable"


class StoreFull(StoreError):
    """The store has no space for this entry, or the disk has none for a change of the catalogue.

    Attributes:
        gave_way: Whether room was made since: the same change may be applied now.
    """

    code = "full"
    gave_way = False

    @property
    def public(self) -> str:
        """What clients of a service are told."""
        return "there is no space left; what was stored before is intact"


class EntryMissing(StoreError):
    """The entry or a part of it does not exist."""

    code = "missing"


class EntryCorrupt(StoreError):
    """The entry exists but failed verification."""

    code = "corrupt"


class NotQuantisable(StoreError):
    """K or V has values that a quantised body cannot represent. The chunk is not stored."""

    code = "not_quantisable"


_NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "could not create a primitive", "bad_alloc")
"""How torch, the operating system, oneDNN and C++ say that memory is short, in exceptions of any type."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of any library says that memory, of the host or of a GPU, is short."""
    if isinstance(error, MemoryError | OutOfMemory) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in _NO_MEMORY)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Replace what libraries raise where memory is short by OutOfMemory."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RagkvError) or not is_out_of_memory(error):
            raise
        raise OutOfMemory from error
