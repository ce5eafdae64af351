"""Fingerprint: one hash of everything that makes stored KV valid. What differs in any of it is a miss, never a hit.

Weights, tokenizer, S, chunk wrapper, block, dtype, digests, body, seal, schema, and how chunks are read at ingest.
"""

from __future__ import annotations

import hashlib
import json

from ragkv.model.decoder import DecoderModel
from ragkv.sparse.base import PrefillPolicy
from ragkv.store.format.head import SCHEMA


def fingerprint(model: DecoderModel, mode: str, body: str, seal: str, reading: PrefillPolicy | None) -> str:
    """mode: what chunks are encoded after · body, seal: how they are stored · reading: how long ones are read."""
    profile = model.profile
    facts = [SCHEMA, body, seal, "pre-rope", mode, model.weights_hash, str(model.dtype), profile.block, profile.local]
    facts += [
        model.prompt.pieces(),
        model.prompt.prefix,
        profile.retrieval_heads,
        repr(reading) if reading else "dense",
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
