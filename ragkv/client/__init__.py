"""A typed client of the HTTP API: `Client`, and `AsyncClient` with the same methods to await.

    from ragkv.client import Client

    with Client("http://127.0.0.1:8000", key="…") as ragkv:
        ragkv.put("yard", "Calloway Yard was founded by Edda Calloway.")
        print(ragkv.ask("Who founded Calloway Yard?").answer)
        for event in ragkv.stream("And where?", conversation_id="yard"):
            ...

Needs neither torch nor a model. Faults are of the project's own tree: `Refused` carries the service's status, code and
words, `Unreachable` says that there is no service.
"""

from ragkv.client.asynchronous import AsyncClient
from ragkv.client.models import (
    AnswerMap,
    Brief,
    Briefs,
    ChunkMap,
    Cited,
    Collection,
    Conversation,
    Document,
    Done,
    Event,
    Job,
    JobCounts,
    JobDocument,
    JobError,
    Page,
    Recalled,
    Reported,
    Retrieved,
    Said,
    Turn,
)
from ragkv.client.synchronous import Client

__all__ = [
    "AnswerMap",
    "AsyncClient",
    "Brief",
    "Briefs",
    "ChunkMap",
    "Cited",
    "Client",
    "Collection",
    "Conversation",
    "Document",
    "Done",
    "Event",
    "Job",
    "JobCounts",
    "JobDocument",
    "JobError",
    "Page",
    "Recalled",
    "Reported",
    "Retrieved",
    "Said",
    "Turn",
]
