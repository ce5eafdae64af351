"""The error tree. Edges (CLI, HTTP) print `str(error)`: it says what happened and what to do next.

RagkvError
├── ConfigError              settings that cannot work                     exit 2
│   ├── ModelNotFound        no such folder, or a hub id without network
│   ├── ModelUnsupported     architecture, rope type or sliding window
│   ├── NotCalibrated        a method needs `ragkv calibrate` first
│   └── EmbedderChanged      the index was built by another embedder       409
├── InputError               what a user sent                              422
│   ├── InvalidDocument      empty, binary, not text                       422
│   ├── TooLarge             over a limit; carries what and how much       413
│   ├── QuotaExceeded        its collection has no room for a document     413
│   └── InvalidBackup        no backup, damaged, or of a newer ragkv
├── NotFound                 no such document, collection, job, conversation  404
├── Busy                     the queue in front of the engine is full      429
├── Expired                  the answer was not there in time              504
├── Stopping                 shutting down, takes no new work              503
├── ServiceError             what a client meets (ragkv.client)            exit 1
│   ├── Refused              the service said no; carries status and code
│   └── Unreachable          there is no service, or it went away
├── CatalogCorrupt           SQLite file damaged: refuse, never start empty  exit 2
└── StoreError               the KV store; never reaches a user's answer
    ├── StoreUnavailable     down, hung or refused
    ├── StoreFull            no space left
    ├── EntryMissing         evicted or never stored
    ├── EntryCorrupt         length, checksum, shape or fingerprint differ
    └── NotQuantisable       numbers that an int8 or fp8 body cannot hold
"""


class RagkvError(Exception):
    """Root of everything this project raises on purpose."""


class ConfigError(RagkvError):
    """Settings that cannot work."""


class ModelNotFound(ConfigError):
    """The model folder or hub id cannot be read."""


class ModelUnsupported(ConfigError):
    """The model's architecture, rope type or attention window is not supported."""


class NotCalibrated(ConfigError):
    """The method needs facts about the model that `ragkv calibrate` finds."""


class EmbedderChanged(ConfigError):
    """Stored vectors come from another embedding model."""


class InputError(RagkvError):
    """A request or document that cannot be served as sent."""


class InvalidDocument(InputError):
    """Empty, binary or undecodable document."""


class TooLarge(InputError):
    """Over a limit; the message carries the limit and the size seen."""


class QuotaExceeded(InputError):
    """A document does not fit into its collection's quota.

    413, not 507: the service has room, but not for this much from this user; sent again unchanged it fails again.
    """


class InvalidBackup(InputError):
    """A file that is no backup, or a damaged one; nothing was restored from it."""


class NotFound(RagkvError):
    """No such document, collection, job or conversation."""


class Busy(RagkvError):
    """The queue in front of the engine is full. retry_after: seconds after which a place is likely."""

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


class Expired(RagkvError):
    """The time an answer may take was up before it was there."""

    def __init__(self) -> None:
        super().__init__("the answer was not there in time; ask again later, with a longer deadline or for less")


class Stopping(RagkvError):
    """The service is shutting down and takes no new work."""


class ServiceError(RagkvError):
    """A service that a client asked did not do what it was asked for."""


class Refused(ServiceError):
    """The service said no. status: of HTTP · code: a stable word for programs, empty where there was none ·
    retry_after: seconds after which to ask again, where it said so."""

    def __init__(self, status: int, code: str, detail: str, retry_after: float | None = None):
        super().__init__(detail)
        self.status, self.code, self.retry_after = status, code, retry_after


class Unreachable(ServiceError):
    """There is no service at the address, or it went away."""


class CatalogCorrupt(RagkvError):
    """The SQLite catalogue is damaged; restoring a backup is the user's decision."""


class StoreError(RagkvError):
    """Faults of the KV store. They cost time, never an answer."""


class StoreUnavailable(StoreError):
    """The store is down, hung or refuses to talk."""


class StoreFull(StoreError):
    """The store has no room for this entry."""


class EntryMissing(StoreError):
    """The entry, or a part of it, is not there."""


class EntryCorrupt(StoreError):
    """The entry is there and is not what it claims to be."""


class NotQuantisable(StoreError):
    """K or V holds numbers that a quantised body cannot hold; the chunk is not stored."""
