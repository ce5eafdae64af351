"""API keys: who may use the service, and as which tenant.

    RAGKV_API_KEYS = tenant=hash,tenant=hash,…     or the name of a file with one pair a line, `#` begins a comment

A hash is SHA-256 of a key, in hex. Keys are 256 random bits, so nobody finds one by trying, however fast trying is;
what makes hashes of passwords slow would cost every request and add nothing. A tenant may have several keys, so that
one can be replaced by another. Neither keys nor hashes are ever in a message.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from ragkv.errors import ConfigError, InputError

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_HASH = re.compile(r"[0-9a-f]{64}")
_HINT = "make pairs with `ragkv key TENANT`"


def make_key(tenant: str) -> tuple[str, str]:
    """(a new key, the pair for the settings). Raises InputError for what cannot be a tenant's name."""
    if not _TENANT.fullmatch(tenant):
        raise InputError("a tenant's name has 1 to 63 letters, digits and hyphens, a hyphen not first")
    key = f"ragkv_{secrets.token_urlsafe(32)}"
    return key, f"{tenant}={_hash(key)}"


@dataclass(frozen=True)
class Keys:
    """entries: (hash, tenant). None: everybody may use the service."""

    entries: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def tenants(self) -> frozenset[str]:
        """Who has keys."""
        return frozenset(tenant for _, tenant in self.entries)

    def whose(self, key: str) -> str | None:
        """The tenant a key is of. Takes equally long whatever the key, and whether there is such a one."""
        given, found = _hash(key), None
        for known, tenant in self.entries:
            if hmac.compare_digest(known, given):
                found = tenant
        return found


def read_keys(setting: str) -> Keys:
    """The keys of a setting. Raises ConfigError, which repeats nothing of it: it may be a key by mistake."""
    pairs = setting.split(",")
    if setting.strip() and "=" not in setting:
        pairs = _lines(Path(setting.strip()))
    entries = [_entry(pair, place) for place, pair in enumerate(pairs, 1) if pair.strip()]
    if len({known for known, _ in entries}) < len(entries):
        raise ConfigError("RAGKV_API_KEYS: one key is there twice; every tenant needs its own")
    return Keys(tuple(entries))


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        raise ConfigError(f"RAGKV_API_KEYS: neither tenant=hash pairs nor a file that can be read; {_HINT}") from None
    if not any(lines):
        raise ConfigError(f"RAGKV_API_KEYS: the file holds no key, so nobody could use the service; {_HINT}")
    return lines


def _entry(pair: str, place: int) -> tuple[str, str]:
    tenant, _, known = pair.partition("=")
    tenant, known = tenant.strip(" "), known.strip(" ").lower()
    if not _TENANT.fullmatch(tenant) or not _HASH.fullmatch(known):
        raise ConfigError(f"RAGKV_API_KEYS: entry {place} is not tenant=hash; {_HINT}")
    return known, tenant


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
