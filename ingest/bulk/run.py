"""A bulk ingest from its listing to the outcomes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragkv import errors
from ragkv.config import Settings, ray_address
from ragkv.errors import RagkvError
from ragkv.ingest.bulk.cluster import WorkerPlan, has_catalog_file, needs_one_machine, running_ray, worker_settings
from ragkv.ingest.bulk.journal import BulkOutcome, IngestJournal
from ragkv.ingest.bulk.listing import SHARE_BYTES, SourceListing
from ragkv.ingest.sandbox import Allowance

if TYPE_CHECKING:
    from ragkv.ingest.bulk.actor import OpenEngine

READERS = 2
"""Tasks that read and parse files at the same time."""
MOST_DEATHS = 10
"""How often workers may die one after another, while no document is done, before the run ends with an error."""


@dataclass(frozen=True)
class BulkIngest:
    """What is ingested, and how.

    Attributes:
        settings: The settings.
        open_engine: Opens the engine of a worker. A function of a module, which workers can import.
        listing: The files.
        collection: Collection of the documents.
        allowed: What parsing a file in its own process may take.
        workers: How many workers; 0: one for each GPU, or else one for each processor, but not more than four.
        notify: Receives lines that a user should see.
    """

    settings: Settings
    open_engine: OpenEngine
    listing: SourceListing
    collection: str
    allowed: Allowance
    workers: int
    notify: Callable[[str], None]


@dataclass(frozen=True)
class WorkerTotals:
    """What the workers have done.

    Attributes:
        workers: How many there were, those that replaced others included.
        encoded: Chunks that they encoded.
    """

    workers: int
    encoded: int


def ingest_with_ray(job: BulkIngest) -> Iterator[BulkOutcome | WorkerTotals]:
    """Ingest the documents of a listing.

    Yields:
        The outcome of every document, in the order in which workers end with them; at last the totals.

    Raises:
        ConfigError: Ray is missing, or cannot be started; a setting is wrong.
        RagkvError: A fault that is none of a document, such as a full disk. What was stored before stays.
    """
    yield from (BulkOutcome("", "failed", error=str(each.error)) for each in job.listing.refused)
    with running_ray(job.settings, job.workers) as plan:
        if ray_address() and needs_one_machine(job.settings):
            job.notify(
                "the workers run on this machine only: on several, they have to share PostgreSQL (RAGKV_CATALOG) and "
                "Redis (RAGKV_STORE)"
            )
        yield from _outcomes(job, plan)
    if has_catalog_file(job.settings):
        _save_index(job.settings, job.collection)


def _outcomes(job: BulkIngest, plan: WorkerPlan) -> Iterator[BulkOutcome | WorkerTotals]:
    import ray
    from ray.data import ActorPoolStrategy, read_datasource

    from ragkv.ingest.bulk.actor import IngestWorker
    from ragkv.ingest.bulk.cluster import NODE_ID
    from ragkv.ingest.bulk.reading import ReadLimits, SourceDocuments, texts_of

    _configure()
    here = {NODE_ID: ray.get_runtime_context().get_node_id()}
    journal = ray.remote(num_cpus=0, label_selector=here)(IngestJournal).remote()
    limits = ReadLimits(job.settings.max_document_bytes, job.collection, job.allowed)
    source = SourceDocuments(job.listing, limits)
    tasks = len(source.get_read_tasks(1))
    if tasks:
        items = read_datasource(source, num_cpus=0, concurrency=min(READERS, tasks), override_num_blocks=tasks)
        # Ray Data starts a dead actor again and hands on its tasks, without end: it sets max_restarts and
        # max_task_retries to -1. The journal ends what has no end.
        done = items.map_batches(
            IngestWorker,
            fn_constructor_args=(
                job.open_engine,
                worker_settings(job.settings, plan),
                journal,
                plan.workers + MOST_DEATHS,
            ),
            compute=ActorPoolStrategy(size=plan.workers, max_tasks_in_flight_per_actor=2),
            batch_size=None,
            batch_format="pyarrow",
            **plan.options(),
        )
        told = 0
        for batch in done.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            notices = ray.get(journal.notices.remote())
            for line in notices[told:]:
                job.notify(line)
            told = len(notices)
            yield from map(_decode, texts_of(batch))
    workers = ray.get(journal.workers.remote())
    yield WorkerTotals(max(plan.workers, len(workers)) if tasks else 0, sum(workers.values()))


def _configure() -> None:
    """Set up Ray Data: small blocks, one of which is what a worker gets at a time, and nothing on the terminal."""
    from ray.data import DataContext

    context = DataContext.get_current()
    context.target_max_block_size = SHARE_BYTES
    context.max_consecutive_actor_init_deaths = MOST_DEATHS
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def _decode(text: str) -> BulkOutcome:
    """Return an outcome, or raise the fault that ends the run."""
    content = json.loads(text)
    if "fault" in content:
        kind = getattr(errors, content["fault"], RagkvError)
        raise kind(content["message"], content["hint"])
    return BulkOutcome(**content)


def _save_index(settings: Settings, collection: str) -> None:
    """Bring the vector index of the collection up to date and write it out, as every other ingest does."""
    from ragkv.catalog import Catalog
    from ragkv.retrieval import Retriever, make_embedder

    catalog = Catalog.open(settings.data / "catalog.sqlite")
    try:
        retriever = Retriever(catalog, make_embedder(settings.embedder), settings.data / "index")
        retriever.views.refresh(collection)
        retriever.views.save()
    finally:
        catalog.close()
