"""KV stores for encoded chunks: the contract (base), the byte format (format/), disk, Redis and Redis Cluster backends,
and the tiers in memory."""

from __future__ import annotations

from pathlib import Path

from ragkv.errors import ConfigError
from ragkv.store.base import KVStore

__all__ = ["KVStore", "open_store"]


def open_store(setting: str, data: Path, timeout: float, ttl: float = 0.0, limit: int = 0) -> KVStore:
    """Open the store that a setting names.

    Args:
        setting: `disk` for files in `data`/kv, or a Redis URL (`rediss` for TLS, `unix` for a socket, `redis+cluster`
            and `rediss+cluster` for some nodes of a cluster).
        data: The data folder.
        timeout: Seconds that a store may take to connect. It need not answer yet.
        ttl: Seconds that an entry lives after it was written, 0 for no expiry.
        limit: Bytes that the disk store may hold, 0 for no limit.

    Raises:
        ConfigError: The setting is unknown, or Redis is given a limit.
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
        # Imported here, because the disk store must work, and start quickly, without a Redis client.
        from ragkv.store.redis_store import RedisStore

        return RedisStore(setting, timeout, ttl or None)
    if setting.startswith(("redis+cluster://", "rediss+cluster://")):
        from ragkv.store.redis_cluster import ClusterStore

        return ClusterStore(setting, timeout, ttl or None)
    # The setting is not quoted as a whole, because it may contain a password.
    raise ConfigError(
        f"store: {setting.split(':')[0]!r} is unknown; use `disk`, `redis://host:port/db` (`rediss` for TLS), "
        "`redis+cluster://host:port,host:port` or `unix:///path`"
    )
