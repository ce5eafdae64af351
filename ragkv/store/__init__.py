"""Where encoded chunks live: base (the contract), codec (what bytes mean), disk, redis and cluster, tiers in memory."""

from __future__ import annotations

from pathlib import Path

from ragkv.errors import ConfigError
from ragkv.store.base import KVStore

__all__ = ["KVStore", "open_store"]


def open_store(setting: str, data: Path, timeout: float, ttl: float = 0.0, limit: int = 0) -> KVStore:
    """The store that a setting names: `disk` (files in `data`/kv), or Redis by URL (`rediss` is TLS, `unix` a socket,
    `redis+cluster` and `rediss+cluster` some nodes of a cluster).

    `timeout`: seconds a store may take to connect; it need not answer yet · `ttl`: seconds an entry lives after it was
    written, 0: for ever · `limit`: bytes that the disk store may hold, 0: any number. Raises ConfigError for any other
    setting, and for a limit on Redis.
    """
    if setting == "disk":
        from ragkv.store.disk_store import DiskStore

        return DiskStore(data / "kv", ttl, limit)
    if limit and setting.startswith(("redis", "unix://")):
        raise ConfigError(
            "RAGKV_STORE_BYTES bounds the disk store only; give the Redis server a `maxmemory` and the "
            "`maxmemory-policy` allkeys-lru, and unset RAGKV_STORE_BYTES"
        )
    if setting.startswith(("redis://", "rediss://", "unix://")):
        # Imported only here: the disk store must work, and start quickly, without a Redis client.
        from ragkv.store.redis_store import RedisStore

        return RedisStore(setting, timeout, ttl or None)
    if setting.startswith(("redis+cluster://", "rediss+cluster://")):
        from ragkv.store.redis_cluster import ClusterStore

        return ClusterStore(setting, timeout, ttl or None)
    # Not the whole setting: it may hold a password.
    raise ConfigError(
        f"store: {setting.split(':')[0]!r} is unknown; use `disk`, `redis://host:port/db` (`rediss` for TLS), "
        "`redis+cluster://host:port,host:port` or `unix:///path`"
    )
