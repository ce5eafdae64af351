"""Checks of the store, and of what index and store have of the catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.cli.doctor_parts import DoctorParts
from ragkv.cli.findings import Findings
from ragkv.errors import without_password

if TYPE_CHECKING:
    from ragkv.config import Settings
    from ragkv.engine.engine import Engine
    from ragkv.store.redis_entry import RedisMemory
    from ragkv.types import Key

_SHOWN = 10


def check_store(settings: Settings, parts: DoctorParts, findings: Findings) -> None:
    """Open the store, count what is in it, and look at the limits of a Redis server."""
    from ragkv.store import open_store
    from ragkv.store.redis_cluster import ClusterStore
    from ragkv.store.redis_store import RedisStore

    if settings.store == "disk" and not settings.data.exists():
        return
    with findings.checking("store"):
        store = open_store(settings.store, settings.data, settings.store_timeout, settings.store_ttl)
        parts.store = store
        store.ping()
        stats = store.stats()
        findings.ok(
            "store", f"{without_password(settings.store)}: {stats.entries} entries, {stats.bytes / 2**20:.1f} MiB"
        )
        if isinstance(store, RedisStore | ClusterStore):
            _memory(store.memory(), settings, findings)


def _memory(servers: tuple[RedisMemory, ...], settings: Settings, findings: Findings) -> None:
    """Print the memory limit and eviction policy of Redis servers. A cache needs a limit and LRU or LFU eviction."""
    do = "set `maxmemory` and `maxmemory-policy allkeys-lru`, as docker-compose.yml does"
    for server in servers:
        if not server.limit:
            findings.note("redis", f"{server.where} has no maxmemory and grows as long as there is memory: {do}")
        elif server.policy == "noeviction":
            findings.note("redis", f"{server.where} takes nothing new when it is full (noeviction): {do}")
        elif server.policy.startswith("volatile-") and not settings.store_ttl:
            words = (
                f"{server.where} evicts only what expires ({server.policy}), and nothing does: {do}, or RAGKV_STORE_TTL"
            )
            findings.note("redis", words)
        else:
            held = f"{server.used / 2**20:.0f} of {server.limit / 2**20:.0f} MiB used"
            findings.ok("redis", f"{server.where}: {held}, {server.policy}")


def check_together(settings: Settings, parts: DoctorParts, findings: Findings) -> None:
    """Check what needs several parts: the index, and missing KV."""
    model, embedder, catalog, store = parts.model, parts.embedder, parts.catalog, parts.store
    if catalog is None or not catalog.count()[0]:
        return
    if model is None or embedder is None or store is None:
        findings.note("kv", "not compared with the catalogue: a part above is missing")
        return
    from ragkv.config import ViewSettings
    from ragkv.engine.engine import Engine
    from ragkv.engine.opening import OpenedParts
    from ragkv.retrieval import Retriever, open_earlier

    folder = settings.data / "index"
    with findings.checking("engine"):
        parameters = Retriever.parameters_of(settings.part(ViewSettings), catalog)
        retriever = Retriever(catalog, embedder, folder, parameters, open_earlier=open_earlier)
        engine = Engine(settings, OpenedParts(model, store, catalog, retriever))
        with findings.checking("index"):
            _index(engine, folder, findings)
        with findings.checking("kv"):
            _kv(engine, findings)


def _index(engine: Engine, folder: Path, findings: Findings) -> None:
    """Check the index. `save` rewrites it only if it is out of date."""
    from ragkv.errors import EmbedderChanged

    try:
        engine.catalog.check_embedder(engine.retriever.embedder.identity)
    except EmbedderChanged as error:
        findings.note("index", str(error))
    change = engine.catalog.reembedding()
    if change is not None:
        findings.note("index", f"{change.done} of {change.total} chunks are embedded with {change.following.name}")
    before = _times(folder)
    for collection in sorted({info.collection for info in engine.catalog.documents(None)}):
        engine.retriever.views.refresh(collection)
    engine.retriever.views.save()
    if _times(folder) == before:
        findings.ok("index", "fresh")
    else:
        findings.note("index", "was missing or behind the catalogue; it is up to date now")


def _times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.faiss")}


def _kv(engine: Engine, findings: Findings) -> None:
    """Print the chunks without KV, which are encoded again when needed, and the unused entries of the store."""
    from ragkv.ingest.pipeline import reader_of

    expected, stale = _expected(engine), 0
    for info in engine.catalog.documents(None):
        stale += info.reader != reader_of(engine, info.collection)
    if stale:
        findings.note("kv", f"{stale} documents were read by another model or chunk size: run `ragkv reindex`")
    stored = set(engine.store.keys())
    missing = [chunk for key, chunk in expected.items() if key not in stored]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        listed = ", ".join(missing[:_SHOWN])
        words = (
            f"{len(missing)} of {len(expected)} chunks have no KV and are encoded at the first question that needs them"
        )
        findings.note("kv", f"{words}: {listed}{more}")
    else:
        findings.ok("kv", f"all {len(expected)} chunks have their KV in the store")
    orphans = len(stored - set(expected))
    if orphans:
        findings.note("kv", f"{orphans} entries belong to no chunk of this catalogue and model: `ragkv gc`")


def _expected(engine: Engine) -> dict[Key, str]:
    """Chunk ids by their key under the current model."""
    return {
        engine.key(chunk, info.collection): f"{info.collection}/{chunk.id}"
        for info in engine.catalog.documents(None)
        for chunk in engine.catalog.chunks_of(info.collection, info.id)
    }
