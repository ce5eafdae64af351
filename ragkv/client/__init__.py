"""A typed client of the HTTP API: `Client`, and `AsyncClient` with the same methods to be awaited.

    from ragkv.client import Client

    with Client("http://127.0.0.1:8000", key="…") as ragkv:
        ragkv.put("yard", "Calloway Yard was founded by Edda Calloway.")
        print(ragkv.ask("Who founded Calloway Yard?").answer)
        for event in ragkv.stream("And where?", conversation_id="yard"):
            ...

The client needs neither torch nor a model. Its errors are here, too: `Refused` carries the status, code and message of
the service, and `Unreachable` reports that there is no connection.
"""

from ragkv.client.asynchronous import AsyncClient
from ragkv.client.chat import ChatAnswer, ChatMessage, TokenUsage
from ragkv.client.document_models import (
    Collection,
    Page,
    RemoteChunk,
    RemoteChunks,
    RemoteDocument,
    RemotePicture,
    RemoteText,
)
from ragkv.client.job_models import Job, JobCounts, JobDocument, JobError
from ragkv.client.models import (
    AnswerMap,
    Brief,
    Briefs,
    ChunkMap,
    Cited,
    Conversation,
    Done,
    Event,
    Recalled,
    Reported,
    Retrieved,
    Said,
    Turn,
)
from ragkv.client.synchronous import Client
from ragkv.client.text_models import Embedding, Embeddings, HandedQuestion, RankedText, RankedTexts
from ragkv.errors import Refused, Unreachable

__all__ = [
    "AnswerMap",
    "AsyncClient",
    "Brief",
    "Briefs",
    "ChatAnswer",
    "ChatMessage",
    "ChunkMap",
    "Cited",
    "Client",
    "Collection",
    "Conversation",
    "Done",
    "Embedding",
    "Embeddings",
    "Event",
    "HandedQuestion",
    "Job",
    "JobCounts",
    "JobDocument",
    "JobError",
    "Page",
    "RankedText",
    "RankedTexts",
    "Recalled",
    "Refused",
    "RemoteChunk",
    "RemoteChunks",
    "RemoteDocument",
    "RemotePicture",
    "RemoteText",
    "Reported",
    "Retrieved",
    "Said",
    "TokenUsage",
    "Turn",
    "Unreachable",
]
