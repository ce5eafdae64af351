"""Seals: tags that verify a stored chunk, and the salts that stand for collections in its key.

    Checksums   xxh3. They find accidents: a flipped bit, a short file, a mixed-up entry. Anyone who can write to the
                store can compute them.
    Keyed       HMAC-SHA256 under a secret that the store never sees. Someone who can write to the store but lacks the
                secret can delete entries. He can neither change one nor guess the key of a text in a collection.

The tag of a block covers only the block's bytes. The place of the tag in the head record gives the layer, position and
chunk, and the whole record, with its tokens and fingerprint, has a tag of its own. So swapped blocks fail verification.
"""

from __future__ import annotations

import hmac
from typing import Protocol

import xxhash

Data = bytes | memoryview

RECORD_BYTES = 16
"""Bytes of a record's tag. Half of an HMAC-SHA256 is the shortest tag that RFC 2104 recommends; a forgery takes 2^128
guesses."""


class Seal(Protocol):
    """Computes tags. Equal bytes get equal tags in every process."""

    @property
    def name(self) -> str:
        """The seal's part of the fingerprint. Entries under another seal are misses."""
        ...

    @property
    def block_bytes(self) -> int:
        """T: bytes of a block's tag."""
        ...

    def salt(self, collection: str) -> str:
        """Return the text that stands for a collection in the keys of its chunks."""
        ...

    def record(self, data: Data) -> bytes:
        """Return the tag of a head record, `RECORD_BYTES` bytes."""
        ...

    def block(self, data: Data) -> bytes:
        """Return the tag of a block, T bytes."""
        ...


class Checksums:
    """xxh3_128 for records, xxh3_64 for blocks. The salt of a collection is its name."""

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
    """HMAC-SHA256, truncated to 16 bytes. Each use has its own key, so that no tag can serve as another."""

    block_bytes = 16

    def __init__(self, secret: str):
        """Derive the keys from a secret, which may be any text.

        It should be random: a guess can be tested against a stored head with one hash.
        """
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
    """Return a keyed seal if there is a secret, else checksums."""
    return Keyed(secret) if secret else CHECKSUMS
