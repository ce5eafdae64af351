"""open_store returns the store that a setting names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ragkv.errors import ConfigError
from ragkv.store import open_store
from ragkv.store.disk_store import DiskStore
from ragkv.store.redis_cluster import ClusterStore
from ragkv.store.redis_store import RedisStore
from tests.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]


def test_disk_is_a_folder_in_the_data_folder(tmp_path: Path) -> None:
    store = open_store("disk", tmp_path, 0.25)
    assert isinstance(store, DiskStore)
    assert store.root == tmp_path / "kv"
    store.ping()


def test_a_redis_url_opens_a_redis_store(server: RedisServer, tmp_path: Path) -> None:
    store = open_store(server.url, tmp_path, 0.25)
    assert isinstance(store, RedisStore)
    store.ping()
    store.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["redis://localhost:6379/0", "rediss://cache.example:6380", "unix:///run/redis.sock"])
def test_redis_schemes_are_accepted_without_a_server(url: str, tmp_path: Path) -> None:
    assert isinstance(open_store(url, tmp_path, 0.25), RedisStore)


@pytest.mark.parametrize("url", ["redis+cluster://one:7000,two:7000", "rediss+cluster://user:word@one"])
def test_cluster_schemes_are_accepted_without_a_server(url: str, tmp_path: Path) -> None:
    assert isinstance(open_store(url, tmp_path, 0.25), ClusterStore)


@pytest.mark.parametrize(
    "setting", ["", "Disk", "memcached://host", "user:sesame@host:6379", "redis:host", "/data", "redis+tls://h"]
)
def test_any_other_setting_is_refused_with_the_allowed_ones(setting: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`disk`.*`redis://host:port/db`.*rediss.*redis\+cluster.*unix") as refused:
        open_store(setting, tmp_path, 0.25)
    assert "sesame" not in str(refused.value)


def test_the_disk_store_needs_no_redis_client(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ragkv.store import open_store\n"
        "open_store('disk', Path(sys.argv[1]), 0.25).ping()\n"
        "print([name for name in ('redis', 'hiredis') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
