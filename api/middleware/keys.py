"""API keys: which tenant a key belongs to.

    RAGKV_API_KEYS = tenant=hash,tenant=hash,…     or a file with one pair per line; `#` starts a comment
    tenant=hash;requests=60;tokens=100000          limits of the tenant, in place of the settings' (rate_limits.py)

A hash is the SHA-256 of a key, in hex. A key is 256 random bits, so it cannot be guessed, however fast guesses are
checked. A slow password hash would cost time on every request and add nothing. A tenant may have several keys, so that
one can be replaced by another. No message ever contains a key or a hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from api.runtime.rate_limits import TenantLimits
from ragkv.errors import ConfigError, InputError

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_HASH = re.compile(r"[0-9a-f]{64}")
_HINT = "make pairs with `ragkv key TENANT`"
LIMITS = tuple(each.name for each in fields(TenantLimits))
"""Names of the limits that a tenant may have."""


def make_key(tenant: str, limits: Mapping[str, int] | None = None) -> tuple[str, str]:
    """Create an API key.

    Args:
        tenant: Name of the tenant.
        limits: Limits of the tenant, by the names of `TenantLimits`.

    Returns:
        The key, and its tenant=hash pair for RAGKV_API_KEYS, with the limits.

    Raises:
        InputError: The tenant's name is invalid.
    """
    if not _TENANT.fullmatch(tenant):
        raise InputError("a tenant's name has 1 to 63 letters, digits and hyphens, and does not start with a hyphen")
    key = f"ragkv_{secrets.token_urlsafe(32)}"
    parts = [f"{tenant}={_hash(key)}", *(f"{name}={value}" for name, value in (limits or {}).items())]
    return key, ";".join(parts)


@dataclass(frozen=True)
class Keys:
    """The configured API keys. Without any, everybody may use the service.

    Attributes:
        entries: Pairs (hash, tenant).
        limits: Limits of the tenants that have their own, by the names of `TenantLimits`.
    """

    entries: tuple[tuple[str, str], ...] = ()
    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def tenants(self) -> frozenset[str]:
        """Tenants that have a key."""
        return frozenset(tenant for _, tenant in self.entries)

    def tenant_of(self, key: str) -> str | None:
        """Return the tenant of a key, or None if the key is unknown. Runs in constant time for every key."""
        digest, found = _hash(key), None
        for entry, tenant in self.entries:
            if hmac.compare_digest(entry, digest):
                found = tenant
        return found


def read_keys(setting: str) -> Keys:
    """Parse RAGKV_API_KEYS.

    Raises:
        ConfigError: The setting is invalid. The message repeats nothing of it, because it may be a key by mistake.
    """
    pairs = setting.split(",")
    if setting.strip() and "=" not in setting:
        pairs = _lines(Path(setting.strip()))
    found = [_entry(pair, place) for place, pair in enumerate(pairs, 1) if pair.strip()]
    if len({digest for digest, _, _ in found}) < len(found):
        raise ConfigError("RAGKV_API_KEYS: one key is there twice; every tenant needs its own")
    limits: dict[str, dict[str, int]] = {}
    for _, tenant, own in found:
        both = limits.setdefault(tenant, {})
        if any(both.get(name, value) != value for name, value in own.items()):
            raise ConfigError(f"RAGKV_API_KEYS: the keys of tenant {tenant} have different limits; give them once")
        both.update(own)
    return Keys(tuple((digest, tenant) for digest, tenant, _ in found), limits)


def read_operators(setting: str, tenants: frozenset[str]) -> frozenset[str]:
    """Parse RAGKV_OPERATORS.

    Raises:
        ConfigError: A tenant in it has no key.
    """
    named = frozenset(name.strip() for name in setting.split(",") if name.strip())
    if missing := sorted(named - tenants):
        raise ConfigError(f"RAGKV_OPERATORS: {', '.join(missing)} has no key in RAGKV_API_KEYS; {_HINT}")
    return named


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        raise ConfigError(f"RAGKV_API_KEYS: neither tenant=hash pairs nor a file that can be read; {_HINT}") from None
    if not any(lines):
        raise ConfigError(f"RAGKV_API_KEYS: the file holds no key, so nobody could use the service; {_HINT}")
    return lines


def _entry(text: str, place: int) -> tuple[str, str, dict[str, int]]:
    """Parse (hash, tenant, limits)."""
    pair, *limits = text.split(";")
    tenant, _, digest = pair.partition("=")
    tenant, digest = tenant.strip(" "), digest.strip(" ").lower()
    if not _TENANT.fullmatch(tenant) or not _HASH.fullmatch(digest):
        raise ConfigError(f"RAGKV_API_KEYS: entry {place} is not tenant=hash; {_HINT}")
    return digest, tenant, dict(_limit(limit, place) for limit in limits)


def _limit(text: str, place: int) -> tuple[str, int]:
    name, _, value = (part.strip() for part in text.partition("="))
    if name not in LIMITS or not re.fullmatch(r"[0-9]{1,15}", value):
        raise ConfigError(
            f"RAGKV_API_KEYS: a limit of entry {place} is not NAME=NUMBER with one of {', '.join(LIMITS)}"
        )
    return name, int(value)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
