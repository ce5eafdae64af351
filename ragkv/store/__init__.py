"""Where encoded chunks live: base (the contract), codec and layout (what the bytes mean), disk, redis and cluster."""

from __future__ import annotations

from pathlib import Path

from ragkv.errors import ConfigError
from ragkv.store.base import KVStore

__all__ = ["KVStore", "open_store"]


def open_store(setting: str, data: Path, timeout: float) -> KVStore:
    """The store that a setting names: `disk` (files in `data`/kv), or Redis by URL (`rediss` is TLS, `unix` a socket,
    `redis+cluster` and `rediss+cluster` some nodes of a cluster).

    `timeout`: seconds a store may take to connect; it need not answer yet. Raises ConfigError for any other setting.
    """
    if setting == "disk":
        from ragkv.store.disk import DiskStore

        return DiskStore(data / "kv")
    if setting.startswith(("redis://", "rediss://", "unix://")):
        # Imported only here: the disk store must work, and start quickly, without a Redis client.
        from ragkv.store.redis import RedisStore

        return RedisStore(setting, timeout)
    if setting.startswith(("redis+cluster://", "rediss+cluster://")):
        from ragkv.store.cluster import ClusterStore

        return ClusterStore(setting, timeout)
    # Not the whole setting: it may hold a password.
    raise ConfigError(
        f"store: {setting.split(':')[0]!r} is unknown; use `disk`, `redis://host:port/db` (`rediss` for TLS), "
        "`redis+cluster://host:port,host:port` or `unix:///path`"
    )
