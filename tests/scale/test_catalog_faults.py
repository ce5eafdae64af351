"""A catalogue in PostgreSQL: what happens when the server goes away, refuses us, or is of a newer ragkv."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.catalog import Catalog, migrations
from ragkv.errors import ConfigError, InputError, RagkvError, StoreUnavailable
from ragkv.ingest.jobs import Jobs
from tests.catalog.test_catalog import put
from tests.ingest.reader import FileEngine, make_document, run_next
from tests.postgres_server import PASSWORD, PostgresServer, postgres_server

pytestmark = pytest.mark.scale


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that tests may stop."""
    with postgres_server() as server:
        yield server


def test_a_restart_of_the_server_is_an_error_to_be_tried_again(own_server: PostgresServer) -> None:
    catalog = Catalog.open(own_server.database())
    put(catalog, "a", ["one"])
    with catalog.listener() as listener:
        listener.wait(0)
        own_server.stop(signal.SIGQUIT)
        for call in (catalog.documents, lambda: put(catalog, "b", ["two"]), lambda: listener.wait(1)):
            with pytest.raises(StoreUnavailable, match="does not answer"):
                call()
        own_server.start()
        assert [each.id for each in catalog.documents()] == ["a"]
        put(catalog, "b", ["two"])
        until = time.monotonic() + 10
        while not (changed := listener.wait(1)) and time.monotonic() < until:
            pass
        assert changed == {"default"}
    catalog.close()


def test_a_document_that_is_ingested_during_a_restart_is_ingested_once(
    own_server: PostgresServer, tmp_path: Path
) -> None:
    engine = FileEngine(tmp_path, where=own_server.database())
    results: list[str] = []
    jobs = Jobs(engine.catalog, 100_000, lambda outcome: results.append(outcome.result))
    job_id = jobs.submit([make_document("a"), make_document("b")])
    with pytest.raises(StoreUnavailable):
        run_next(jobs, engine, lambda: own_server.stop() if engine.encoded == 2 else None)
    with pytest.raises(StoreUnavailable):
        run_next(jobs, engine)
    own_server.start()
    while run_next(jobs, engine):
        pass
    assert (jobs.get(job_id).status, results) == ("completed", ["added", "added"])
    assert engine.stored() == engine.catalog.keys()
    engine.close()


def test_no_error_and_no_line_of_the_log_holds_the_password(
    own_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    catalog = Catalog.open(own_server.database())
    nobody = f"postgresql+psycopg://u:{PASSWORD}@127.0.0.1:1/x"
    addresses = (own_server.url("missing"), own_server.url().replace("postgres:", "stranger:", 1), nobody)
    for address in (*addresses, f"mysql://u:{PASSWORD}@h/x", f"postgresql+psycopg://u:{PASSWORD}@h:port/x"):
        with pytest.raises(RagkvError) as caught:
            Catalog.open(address)
        chain: BaseException | None = caught.value
        while chain is not None:
            assert PASSWORD not in f"{chain} {chain!r}"
            chain = chain.__cause__
    assert PASSWORD not in catalog.name
    assert PASSWORD not in caplog.text
    catalog.close()


@pytest.mark.parametrize(("database", "password"), [("missing", PASSWORD), ("postgres", "wrong")])
def test_a_refused_login_is_a_fault_of_the_settings(own_server: PostgresServer, database: str, password: str) -> None:
    with pytest.raises(ConfigError, match="cannot use the catalogue"):
        Catalog.open(own_server.url(database, password))


def test_a_database_of_a_newer_version_is_refused(postgres: PostgresServer) -> None:
    address = postgres.database()
    Catalog.open(address).close()
    postgres.sql("UPDATE alembic_version SET version_num = 'later'", address.rpartition("/")[2])
    with pytest.raises(ConfigError, match=r"newer ragkv.*'later'"):
        Catalog.open(address)


def test_a_locked_catalogue_is_busy(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv.catalog.database.BUSY_SECONDS", 0.1)
    catalog = Catalog.open(postgres.database())
    with catalog.write(), pytest.raises(StoreUnavailable, match="busy"):
        put(catalog, "a", ["one"])
    put(catalog, "a", ["one"])
    catalog.close()


def test_writers_that_run_together_do_not_wait_for_each_other(postgres: PostgresServer) -> None:
    catalog = Catalog.open(postgres.database())
    with catalog.write(alone=False):
        put(catalog, "a", ["one"])
    catalog.close()


def test_text_that_postgresql_cannot_hold_is_refused(postgres: PostgresServer) -> None:
    catalog = Catalog.open(postgres.database())
    with pytest.raises(InputError, match="NUL"):
        catalog.find("default", "a\0b")
    with pytest.raises(ConfigError, match="pg_dump"):
        catalog.copy(Path("copy"))
    with pytest.raises(ConfigError, match="no word index"):
        catalog.match("default", "word", 5)
    catalog.close()


def test_all_migrations_are_recorded(postgres: PostgresServer) -> None:
    address = postgres.database()
    Catalog.open(address).close()
    assert postgres.sql("SELECT version_num FROM alembic_version", address.rpartition("/")[2]) == [(migrations.HEAD,)]
