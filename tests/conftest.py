"""What every test gets: no settings of the person who runs it, and no network for model weights."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ragkv.engine.engine import Engine
    from ragkv.model.decoder import DecoderModel
    from ragkv.retrieval import Embedder
    from tests.postgres_server import PostgresServer

# Heavy modules are imported by the fixtures that need them: the process that only hands files to the workers of xdist
# reads this file as well, and the workers wait for it.
os.environ["HF_HUB_OFFLINE"] = "1"
for name in [name for name in os.environ if name.startswith("RAGKV_")]:
    del os.environ[name]
# The small model, not the default one: quick, and there without its package. Programs that tests start inherit it.
os.environ["RAGKV_MODEL"] = str(Path(__file__).resolve().parent.parent / "models" / "tiny")
os.environ["RAGKV_GATE"] = "false"  # what is answered must not depend on how quick the machine is just now
os.environ["SSL_CERT_DIR"] = "/nowhere"  # every HTTP client would read the certificates of all authorities
os.environ["RAGKV_DTYPE"] = "float32"  # identities and goldens are those of float32, on every CPU

ROOT = Path(__file__).resolve().parent.parent


gc.disable()  # what the collection of tests makes and imports stays


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not visit its four million objects again and again."""
    gc.freeze()
    gc.set_threshold(10_000)  # as the program does
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With xdist a worker runs a whole file; all of the dashboard's, because their service takes long to start.

    Groups by marks (`--dist loadgroup`) do not work: xdist 3.8 writes them where pytest 9.2 does not read them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "dashboard" if path.startswith("tests/api/dashboard/") else path

    return FileScheduling(config, log)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A suite that a shell started with & ignores SIGINT, and its children would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """Folder of the small model."""
    return ROOT / "models" / "tiny"


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> DecoderModel:
    """The small model, float32 on the CPU."""
    from ragkv.model.decoder import DecoderModel

    return DecoderModel.load(str(tiny_folder), "cpu", "float32")


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    """The packaged embedder: loading it takes seconds, so it is loaded once."""
    from ragkv.retrieval import Embedder

    return Embedder()


@pytest.fixture(scope="session", autouse=True)
def made_once() -> Iterator[None]:
    """Engines and services of this process share what is alike. Where no test opens one, nothing is imported."""
    if "ragkv.catalog.sqlite_file" not in sys.modules:
        yield
        return
    from tests.made_once import sharing

    with sharing():
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tests with a model so small that waking a second thread takes longer than the work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for the whole session; for tests that carry the marker `scale`."""
    from tests.postgres_server import postgres_server

    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.scale)])
def catalog_address(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """A new catalogue for `Catalog.open`, in each kind of database. See also tests/catalogs.py."""
    if request.param == "sqlite":
        return tmp_path / "data" / "catalog.sqlite"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.database()


@pytest.fixture(scope="session")
def two_documents(tmp_path_factory: pytest.TempPathFactory, model: DecoderModel, embedder: Embedder) -> Path:
    """A data folder with the sample documents 01 and 02, on disk. Tests open copies of it (libraries.open_copy)."""
    from tests.built_once import built_once
    from tests.libraries import open_library

    return built_once(
        tmp_path_factory, "two", lambda folder: open_library(folder, model, embedder, ("01", "02")).close()
    )


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory, model: DecoderModel, embedder: Embedder) -> Iterator[Engine]:
    """An engine over six of the sample documents, on disk. Tests that change it make their own."""
    from tests.built_once import built_once
    from tests.libraries import open_copy, open_library

    filled = built_once(tmp_path_factory, "six", lambda folder: open_library(folder, model, embedder).close())
    with open_copy(filled, tmp_path_factory.mktemp("library") / "data", model, embedder) as engine:
        yield engine
