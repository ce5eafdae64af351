"""Which settings allow a bulk ingest, and what a worker is given."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ragkv.config import load_settings
from ragkv.errors import ConfigError, MissingPackage
from ragkv.ingest.bulk.cluster import WorkerPlan, check_settings, needs_one_machine, worker_settings


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    with pytest.raises(MissingPackage, match=r"pip install 'ray\[serve,data\]"):
        check_settings(load_settings())


@pytest.mark.parametrize("device", ["cuda:1", "spread"])
def test_a_device_that_workers_cannot_share_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="a GPU of its own"):
        check_settings(load_settings(device=device))


def test_a_cluster_that_this_machine_is_no_node_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match="ray start --address"):
        check_settings(load_settings())


@pytest.mark.parametrize("store", ["disk", "redis://host:6379/0"])
def test_files_of_this_machine_keep_the_workers_on_it(store: str) -> None:
    assert needs_one_machine(load_settings(store=store)), "the catalogue is a file"


def test_a_worker_gets_its_threads_and_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    own = worker_settings(load_settings(model="mine", data=Path("data")), WorkerPlan(2, 3, False, ""))
    assert (own.model, own.data, own.threads) == (str(tmp_path / "mine"), tmp_path / "data", 3)
    assert worker_settings(load_settings(model="a/hub-id"), WorkerPlan(1, 1, False, "")).model == "a/hub-id"


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (WorkerPlan(2, 3, False, ""), {"num_cpus": 3}),
        (WorkerPlan(2, 3, True, ""), {"num_gpus": 1}),
        (WorkerPlan(1, 1, False, "abc"), {"num_cpus": 1, "label_selector": {"ray.io/node-id": "abc"}}),
    ],
)
def test_a_worker_asks_for_its_cpus_or_a_gpu(plan: WorkerPlan, options: dict[str, Any]) -> None:
    assert plan.options() == options
