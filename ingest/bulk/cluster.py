"""Ray for a bulk ingest: starts it on this machine or joins a cluster, and says how many workers run where."""

from __future__ import annotations

import importlib.util
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv.config import Settings, offer_environment, ray_address
from ragkv.errors import ConfigError, MissingPackage
from ragkv.model.processors import usable_processors

OBJECT_STORE = 200 * 2**20
"""Bytes of the object store of a Ray that is started here. Only texts and outcomes pass through it."""
DEFAULT_WORKERS = 4
"""Workers on CPUs at most, where the user names no number: each holds a model in memory."""
NODE_ID = "ray.io/node-id"
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_DATA_USAGE_DISABLED": "1",
}


@dataclass(frozen=True)
class WorkerPlan:
    """The workers of an ingest.

    Attributes:
        workers: How many.
        threads: CPU threads of each.
        gpu: Whether each has a GPU of its own.
        node: The node that they have to run on; "" for any.
    """

    workers: int
    threads: int
    gpu: bool
    node: str

    def options(self) -> dict[str, Any]:
        """Return the resources of a worker, as Ray Data takes them."""
        selector = {"label_selector": {NODE_ID: self.node}} if self.node else {}
        # With a GPU there is one worker for each; the CPUs are not what limits them.
        resources = {"num_gpus": 1} if self.gpu else {"num_cpus": self.threads}
        return {**resources, **selector}


def check_settings(settings: Settings) -> None:
    """Raise ConfigError where these settings allow no bulk ingest, MissingPackage without Ray."""
    if settings.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"every worker has a GPU of its own; --device {settings.device} needs `ragkv ingest` alone")
    if (address := ray_address()).startswith("ray://"):
        raise ConfigError(
            f"{address}: the command has to run on a node of the cluster; make this machine one with "
            "`ray start --address=HOST:PORT`, and set RAY_ADDRESS=auto"
        )
    for package in ("ray", "pyarrow"):  # not imported here: Ray reads the environment when it is imported
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(
                f"--ray needs {package}, which is not installed: pip install 'ray[serve,data]>=2.60,<2.61'"
            )


@contextmanager
def running_ray(settings: Settings, workers: int) -> Iterator[WorkerPlan]:
    """Start Ray on this machine, or join the cluster that RAY_ADDRESS names, until the context ends.

    Args:
        settings: The settings.
        workers: How many workers the user wants; 0: as many as are sensible.

    Raises:
        ConfigError: The cluster cannot be joined, or it lacks CPUs or GPUs.
        MissingPackage: Ray is not installed.
    """
    offer_environment(RAY_ENVIRONMENT)
    if not ray_address():
        # Who knows the token of Ray can run programs by it. This one is known to the processes of this command only.
        offer_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    check_settings(settings)
    import ray

    try:
        _start_or_join(settings, workers)
        yield plan_workers(settings, workers)
    finally:
        ray.shutdown()


def _start_or_join(settings: Settings, workers: int) -> None:
    """Start Ray, or join a cluster. Raises ConfigError."""
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address := ray_address():
            ray.init(address=address, **quiet)
            return
        ray.init(
            address="local",
            num_cpus=max(usable_processors(), (workers or DEFAULT_WORKERS) * (settings.threads or 1)) + 1,
            object_store_memory=OBJECT_STORE,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
    except Exception as error:  # Ray raises Exception itself where a process of it takes longer than 30 s to start
        where = f"join the Ray cluster {ray_address()}" if ray_address() else "start Ray"
        raise ConfigError(f"cannot {where}: {' '.join(str(error).split())[:300]}") from error


def plan_workers(settings: Settings, workers: int) -> WorkerPlan:
    """Say how many workers run, and where. Raises ConfigError if Ray lacks the CPUs or GPUs."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    node = here if ray_address() and needs_one_machine(settings) else ""
    found = _resources(node)
    gpus = 0 if settings.device == "cpu" else int(found.get("GPU", 0))
    if workers > gpus > 0 or (settings.device == "cuda" and not gpus):
        raise ConfigError(f"{workers or 1} workers need as many GPUs, Ray has {gpus}; give fewer, or --device cpu")
    if gpus:
        return WorkerPlan(
            workers or gpus, settings.threads or max(1, usable_processors() // (workers or gpus)), True, node
        )
    processors = int(found.get("CPU", 0)) if ray_address() else usable_processors()
    count = workers or min(DEFAULT_WORKERS, max(1, processors // (settings.threads or 1)))
    threads = settings.threads or max(1, processors // count)
    if ray_address() and count * threads > processors:
        raise ConfigError(f"{count} workers need {count * threads} CPUs, Ray has {processors}; give fewer --workers")
    return WorkerPlan(count, threads, False, node)


def has_catalog_file(settings: Settings) -> bool:
    """Whether the catalogue is a file of this machine, and not on a server."""
    return not str(getattr(settings, "catalog", "")).startswith("postgresql")


def needs_one_machine(settings: Settings) -> bool:
    """Whether the catalogue or the KV store is in files of this machine, so that all workers have to run on it."""
    return has_catalog_file(settings) or not settings.store.startswith("redis")


def worker_settings(settings: Settings, plan: WorkerPlan) -> Settings:
    """Return the settings of a worker. Its working folder may be another one, so paths are absolute."""
    paths = {name: getattr(settings, name) for name in ("model", "adapter", "embedder")}
    found = {name: str(Path(path).absolute()) for name, path in paths.items() if path and Path(path).exists()}
    return settings.model_copy(update={**found, "data": settings.data.absolute(), "threads": plan.threads})


def _resources(node: str) -> dict[str, float]:
    """Return what a node has, or for "" all nodes together."""
    import ray

    alive = [each for each in ray.nodes() if each["Alive"]]
    return next((dict(each["Resources"]) for each in alive if each["NodeID"] == node), dict(ray.cluster_resources()))
