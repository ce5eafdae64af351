"""Fingerprint: one hash of everything that makes stored KV valid. KV with another fingerprint is a miss, never a hit.

It covers weights, tokenizer, S, the piece of a chunk, block, dtype, digests, body, seal, schema, states, ingest policy.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import EARLIER_BLOCK, Profile
from ragkv.sparse.prefill import PrefillPolicy
from ragkv.store.format.head import SCHEMA


def fingerprint(model: DecoderModel, mode: str, body: str, seal: str, ingest_policy: PrefillPolicy | None) -> str:
    """Return the fingerprint as hexadecimal digits.

    Args:
        model: The model.
        mode: What chunks are encoded after: `shared` or `isolated`.
        body: Form of stored K and V.
        seal: Name of what vouches for stored bytes.
        ingest_policy: How long chunks attend while they are encoded; None is dense.
    """
    return _hashed(model, model.profile, mode, body, seal, ingest_policy)


def keep_stored_block(
    model: DecoderModel, stored: str | None, mode: str, body: str, seal: str, ingest_policy: PrefillPolicy | None
) -> None:
    """Let a model without calibration read KV that an earlier release has stored, in the blocks that it had then.

    Args:
        model: The model; its profile may change.
        stored: Fingerprint of the KV in the store; None where there is none.
        mode: The other arguments are as for `fingerprint`.
    """
    earlier = replace(model.profile, block=EARLIER_BLOCK)
    if not model.profile.retrieval_heads and stored == _hashed(model, earlier, mode, body, seal, ingest_policy):
        model.profile = earlier


def _hashed(
    model: DecoderModel, profile: Profile, mode: str, body: str, seal: str, ingest_policy: PrefillPolicy | None
) -> str:
    facts = [SCHEMA, body, seal, "pre-rope", mode, model.weights_hash, str(model.dtype), profile.block, profile.local]
    facts += [f"states {model.states.bytes}"] if model.states.bytes else []
    facts += [
        model.prompt.pieces(),
        model.prompt.prefix,
        profile.retrieval_heads,
        repr(ingest_policy) if ingest_policy else "dense",
    ]
    if profile.importance_axis != "row":  # what was stored before there was a choice stays valid
        facts.append(profile.importance_axis)
    if profile.importance_constant != "free":
        facts.append(f"constant {profile.importance_constant}")
    if profile.key_means != "plain":
        facts.append(f"means {profile.key_means}")
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
