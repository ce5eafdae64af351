"""What makes a stored chunk believable: tags over its bytes, and the names of collections inside its key.

    Checksums   xxh3: finds accidents (a bit flip, a short file, a mixed-up entry). Who may write to the store can
                compute them anew.
    Keyed       HMAC-SHA256 under a secret that the store never sees: who may write to the store without the secret can
                lose entries, but can neither change one nor guess the key of a text in somebody's collection.

A block's tag covers its bytes alone. Its layer, its position and its chunk are the tag's place in the head, and the
head's record, tokens and fingerprint included, is tagged whole: blocks that trade places fail.
"""

from __future__ import annotations

import hmac
from typing import Protocol

import xxhash

Data = bytes | memoryview

RECORD_BYTES = 16
"""Bytes of a record's tag. Half of an HMAC-SHA256 is the least that RFC 2104 advises, and takes 2^128 guesses."""


class Seal(Protocol):
    """Computes tags. Equal bytes have equal tags, in every process."""

    @property
    def name(self) -> str:
        """Goes into the fingerprint: entries under another seal are another's."""
        ...

    @property
    def block_bytes(self) -> int:
        """T: bytes of a block's tag."""
        ...

    def salt(self, collection: str) -> str:
        """What stands for a collection in the keys of its chunks."""
        ...

    def record(self, data: Data) -> bytes:
        """The tag of a head's record, RECORD_BYTES bytes."""
        ...

    def block(self, data: Data) -> bytes:
        """The tag of a block, T bytes."""
        ...


class Checksums:
    """xxh3_128 of a record, xxh3_64 of a block; a collection stands for itself."""

    name = "xxh3"
    block_bytes = 8

    def salt(self, collection: str) -> str:
        """See Seal.salt."""
        return collection

    def record(self, data: Data) -> bytes:
        """See Seal.record."""
        return xxhash.xxh3_128_digest(data)

    def block(self, data: Data) -> bytes:
        """See Seal.block."""
        return xxhash.xxh3_64_digest(data)


class Keyed:
    """HMAC-SHA256, cut to 16 bytes, under a key of its own for each use, so that no tag serves as another."""

    block_bytes = 16

    def __init__(self, secret: str):
        """Any text. What it takes to try secrets against a stored head is one hash each, so it should be random."""
        self._salts, self._records, self._blocks, mark = (
            hmac.digest(secret.encode(), b"ragkv seal 1: " + use, "sha256")
            for use in (b"collection", b"record", b"block", b"name")
        )
        self.name = f"hmac {mark[:8].hex()}"

    def __repr__(self) -> str:
        return f"Keyed({self.name!r})"

    def salt(self, collection: str) -> str:
        """See Seal.salt."""
        return hmac.digest(self._salts, collection.encode(), "sha256").hex()

    def record(self, data: Data) -> bytes:
        """See Seal.record."""
        return hmac.digest(self._records, data, "sha256")[:RECORD_BYTES]

    def block(self, data: Data) -> bytes:
        """See Seal.block."""
        return hmac.digest(self._blocks, data, "sha256")[: self.block_bytes]


CHECKSUMS = Checksums()


def make_seal(secret: str) -> Seal:
    """Keyed where there is a secret, else checksums."""
    return Keyed(secret) if secret else CHECKSUMS
