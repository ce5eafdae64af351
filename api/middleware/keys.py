"""API keys: which tenant a key belongs to.

    RAGKV_API_KEYS = tenant=hash,tenant=hash,…     or a file with one pair per line; `#` starts a comment
    tenant=hash;role=reader                        a key that may not change documents
    tenant=hash;requests=60;tokens=100000          limits of the tenant, in place of the settings' (rate_limits.py)

A hash is the SHA-256 of a key, in hex. A key is 256 random bits, so it cannot be guessed, however fast guesses are
checked. A slow password hash would cost time on every request and add nothing. A tenant may have several keys, so that
one can be replaced by another. No message ever contains a key or a hash: the audit log names a key by `name_of_key`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from ragkv.api.runtime.callers import ROLES, Caller, Role
from ragkv.api.runtime.rate_limits import TenantLimits
from ragkv.api.runtime.tenants import Tenant
from ragkv.errors import ConfigError, InputError

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_HASH = re.compile(r"[0-9a-f]{64}")
_HINT = "make pairs with `ragkv key TENANT`"
LIMITS = tuple(each.name for each in fields(TenantLimits))
"""Names of the limits that a tenant may have."""


def make_key(tenant: str, limits: Mapping[str, int] | None = None, role: Role = "writer") -> tuple[str, str]:
    """Create an API key.

    Args:
        tenant: Name of the tenant.
        limits: Limits of the tenant, by the names of `TenantLimits`.
        role: What the key allows.

    Returns:
        The key, and its tenant=hash pair for RAGKV_API_KEYS, with the role and the limits.

    Raises:
        InputError: The tenant's name is invalid.
    """
    if not is_tenant_name(tenant):
        raise InputError("a tenant's name has 1 to 63 letters, digits and hyphens, and does not start with a hyphen")
    key = f"ragkv_{secrets.token_urlsafe(32)}"
    options = {} if role == "writer" else {"role": role}
    parts = [f"{tenant}={_hash(key)}", *(f"{name}={value}" for name, value in {**options, **(limits or {})}.items())]
    return key, ";".join(parts)


def is_tenant_name(name: str) -> bool:
    """Return whether a tenant may have this name."""
    return _TENANT.fullmatch(name) is not None


def name_of_key(digest: str) -> str:
    """Return the name of the key with this hash. It leads back to neither of them."""
    return f"key-{hashlib.sha256(f'ragkv key {digest}'.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class KeyEntry:
    """A key of the settings.

    Attributes:
        digest: Its hash.
        tenant: Its tenant.
        role: What it allows.
    """

    digest: str
    tenant: str
    role: Role = "writer"


@dataclass(frozen=True)
class Keys:
    """The configured API keys. Without any, everybody may use the service.

    Attributes:
        entries: The keys.
        limits: Limits of the tenants that have their own, by the names of `TenantLimits`.
    """

    entries: tuple[KeyEntry, ...] = ()
    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def tenants(self) -> frozenset[str]:
        """Tenants that have a key."""
        return frozenset(entry.tenant for entry in self.entries)

    @property
    def secret(self) -> bytes:
        """A secret that only who knows all entries can compute. It changes with each of them."""
        lines = sorted(f"{entry.digest} {entry.tenant} {entry.role}" for entry in self.entries)
        return hashlib.sha256("\n".join(lines).encode()).digest()

    def caller_of(self, key: str) -> Caller | None:
        """Return who sends a key, or None if the key is unknown. Runs in constant time for every key."""
        digest, found = _hash(key), None
        for entry in self.entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return Caller(Tenant(found.tenant), name_of_key(digest), found.role) if found else None


def read_keys(setting: str) -> Keys:
    """Parse RAGKV_API_KEYS.

    Raises:
        ConfigError: The setting is invalid. The message repeats nothing of it, because it may be a key by mistake.
    """
    pairs = setting.split(",")
    if setting.strip() and "=" not in setting:
        pairs = _lines(Path(setting.strip()))
    found = [_entry(pair, place) for place, pair in enumerate(pairs, 1) if pair.strip()]
    if len({entry.digest for entry, _ in found}) < len(found):
        raise ConfigError("RAGKV_API_KEYS: one key is there twice; every tenant needs its own")
    limits: dict[str, dict[str, int]] = {}
    for entry, own in found:
        both = limits.setdefault(entry.tenant, {})
        if any(both.get(name, value) != value for name, value in own.items()):
            raise ConfigError(f"RAGKV_API_KEYS: the keys of tenant {entry.tenant} have different limits")
        both.update(own)
    return Keys(tuple(entry for entry, _ in found), limits)


def read_operators(setting: str, tenants: frozenset[str]) -> frozenset[str]:
    """Parse RAGKV_OPERATORS.

    Raises:
        ConfigError: A tenant in it can use the service with neither a key nor a token.
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


def _entry(text: str, place: int) -> tuple[KeyEntry, dict[str, int]]:
    """Parse a key and the limits of its tenant."""
    pair, *options = text.split(";")
    tenant, _, digest = pair.partition("=")
    tenant, digest = tenant.strip(" "), digest.strip(" ").lower()
    if not is_tenant_name(tenant) or not _HASH.fullmatch(digest):
        raise ConfigError(f"RAGKV_API_KEYS: entry {place} is not tenant=hash; {_HINT}")
    role: Role = "writer"
    limits: dict[str, int] = {}
    for option in options:
        name, _, value = (part.strip() for part in option.partition("="))
        named = next((each for each in ROLES if each == value), None) if name == "role" else None
        if named is not None:
            role = named
        elif name in LIMITS and re.fullmatch(r"[0-9]{1,15}", value):
            limits[name] = int(value)
        else:
            raise ConfigError(
                f"RAGKV_API_KEYS: an option of entry {place} is neither role=reader nor role=writer, and no limit "
                f"NAME=NUMBER with one of {', '.join(LIMITS)}"
            )
    return KeyEntry(digest, tenant, role), limits


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
