"""Paths of requests that ask or compute: they use tokens, change no documents, and are open to readers."""

from __future__ import annotations

INFERENCE = frozenset(
    {
        *("/v1/answers", "/v1/embeddings", "/v1/rerank", "/v1/handovers", "/v1/handovers/rows"),
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
        *("/api/chat", "/api/generate"),
    }
)
