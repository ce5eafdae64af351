"""`ragkv doctor`: check every part separately, and print what was found and how to fix faults.

With `--url` the service at that address is checked instead (doctor_service.py).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv import __version__
from ragkv.cli.common import Data, Device, Model, Store, Url, moment, out, strange_variables, tell
from ragkv.cli.doctor_parts import DoctorParts
from ragkv.cli.doctor_service import address, keys, limits, service
from ragkv.cli.doctor_store import check_store, check_together
from ragkv.cli.findings import Findings
from ragkv.errors import InputError, without_password

if TYPE_CHECKING:
    from ragkv.catalog import Catalog
    from ragkv.config import Settings
    from ragkv.model.decoder import DecoderModel
    from ragkv.model.source import ModelSource


def doctor(
    forget_set_aside: Annotated[
        bool, typer.Option("--forget-set-aside", help="Remove the documents that were set aside.")
    ] = False,
    data: Data = None,
    store: Store = None,
    model: Model = None,
    device: Device = None,
    url: Url = None,
) -> int:
    """Check settings, model, embedder, catalogue, KV store, index and what `ragkv serve` needs, or, with --url, how a
    service is; exit code 1 when something is wrong."""
    from ragkv.config import load_settings

    settings = load_settings(data=data, store=store, model=model, device=device, url=url)
    if settings.url and forget_set_aside:
        raise InputError(
            "what was set aside is removed where the data folder is; run `ragkv doctor` there, without --url"
        )
    given = {"data": data, "store": store, "model": model, "device": device, "url": url}
    findings = Findings()
    for line in strange_variables():
        findings.note("setting", line)
    load = os.getloadavg()[0]  # before the checks, which are work themselves
    if settings.url:
        findings.fact("client", f"ragkv {__version__}; the service has settings of its own")
        service(settings, findings)
    else:
        _versions(findings)
        _settings(settings, given, findings)
        _processors(load, findings)
        _here(settings, findings, forget_set_aside)
    console = out()
    if findings.wrong:
        console.print(f"{findings.wrong} things are wrong" if findings.wrong > 1 else "one thing is wrong")
        return 1
    console.print("all is well")
    return 0


def _here(settings: Settings, findings: Findings, forget_set_aside: bool) -> None:
    """Check all parts on this machine. forget_set_aside: remove the documents that were set aside."""
    parts = DoctorParts()
    try:
        _model(settings, parts, findings)
        _embedder(settings, parts, findings)
        _catalog(settings, parts, findings)
        if parts.catalog is not None:
            _set_aside(parts.catalog, findings, forget_set_aside)
        check_store(settings, parts, findings)
        check_together(settings, parts, findings)
    finally:
        parts.close()
    keys(settings, findings)
    address(settings, findings)
    limits(settings, findings)


def _versions(findings: Findings) -> None:
    import torch

    names = ("torch", "transformers", "faiss-cpu", "redis", "fastapi")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names]
    own = [f"ragkv {__version__}", f"Python {platform.python_version()}", f"SQLite {sqlite3.sqlite_version}"]
    findings.fact("versions", ", ".join([*own, *found]))
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    findings.fact(
        "machine", f"{platform.machine()}, {torch.get_num_threads()} threads, GPU: {', '.join(gpus) or 'none'}"
    )


def _processors(load: float, findings: Findings, quota: float | None = None) -> None:
    """Print what keeps the model from the processors of this machine.

    Args:
        load: Mean number of processes that ran or wanted to run within the last minute.
        findings: Gets the findings.
        quota: Processors that the control group may use; None looks it up.
    """
    from ragkv.model.processors import cpu_quota, usable_processors

    quota, usable = quota or cpu_quota(), usable_processors()
    there = f"{usable} processor{'s' * (usable != 1)}"
    if quota is not None:
        findings.note("quota", f"the control group may use {quota:.2g} processors; the model takes {there}")
    if load > usable / 2:
        words = f"other programs keep {load:.1f} of {there} busy: answers take longer; RAGKV_THREADS=1 may be quicker"
        findings.note("load", words)
    else:
        findings.ok("load", f"{load:.1f} of {there} busy")


def _settings(settings: Settings, given: Mapping[str, object], findings: Findings) -> None:
    """Print the settings that are not at their defaults, and where each comes from: an option, or elsewhere."""
    values = settings.model_dump()
    for name in (name for name in values if name in settings.model_fields_set):
        origin = "option" if given.get(name) is not None else "environment or ragkv.toml"
        findings.fact("setting", f"{name} = {without_password(str(values[name])) or '(empty)'}  [{origin}]")
    rest = len(values) - len(settings.model_fields_set)
    findings.fact("setting", f"{rest} others have their defaults (docs/settings.md lists them)")


def _model(settings: Settings, parts: DoctorParts, findings: Findings) -> None:
    from ragkv.engine.open_model import load_model, model_source
    from ragkv.model.families import describe_family, describe_layers
    from ragkv.model.supported import architecture_of

    with findings.checking("model"):
        source = model_source(settings)
        _source(source, settings, findings)
        # The note of the source is a finding already.
        parts.model = model = load_model(settings, tell, replace(source, note=""))
        shape, profile = model.shape, model.profile
        findings.ok(
            "model",
            f"{model.name}: {architecture_of(model.config)}, {shape.layers} layers, {shape.q_heads} query and "
            f"{shape.kv_heads} KV heads of {shape.head_dim}, {str(model.dtype).removeprefix('torch.')} on "
            f"{model.device_names}, reads {model.max_positions} tokens",
        )
        findings.fact("family", describe_family(model.config.model_type))
        findings.fact("layers", describe_layers(model.kinds, model.wired, len(model.states.recurrent), model.readers))
        heads = len(profile.retrieval_heads)
        size = f"chunks of {settings.chunk_tokens or profile.chunk_tokens} tokens in blocks of {profile.block}"
        if heads:
            findings.ok("profile", f"calibrated, {heads} retrieval heads, {size}")
        else:
            findings.ok("profile", f"not calibrated, {size}")
        if profile.quality:
            findings.ok("quality", profile.quality)
        else:
            findings.fact("quality", "not measured on your documents (`ragkv calibrate --documents` does it)")
        _reuse(model, settings, findings)


def _source(source: ModelSource, settings: Settings, findings: Findings) -> None:
    """Print what is loaded: the model's file or folder, its adapter, and where GGUF files are converted into."""
    from ragkv.model.source import PACKAGE

    findings.fact("source", source.model)
    findings.fact("adapter", source.adapter or "none")
    for collection, wrapper in source.wrappers:
        findings.fact("wrapper", f"{wrapper} around chunks of {collection or 'all collections'}")
    folder = settings.model_cache_folder
    count = len([path for path in folder.iterdir() if not path.name.startswith(".")]) if folder.is_dir() else 0
    findings.fact("cache", f"{folder}: {count} converted models")
    if source.note:
        findings.note("default", source.note)
    elif not settings.model:
        findings.ok("default", f"{PACKAGE} is installed")


def _reuse(model: DecoderModel, settings: Settings, findings: Findings) -> None:
    """Run the engine's self-test again, whatever its stored result."""
    from ragkv.engine.prefill import Prefiller
    from ragkv.engine.self_test import self_test

    found = self_test(Prefiller(model, model.prompt.prefix, settings.prefix))
    if found.reason:
        findings.fault("reuse", f"{found.reason}; every question is answered by full, without stored KV")
        return
    errors = f"{found.layer_loop:.1g}, {found.stored_rows:.1g} and {found.recompute:.1g}"
    findings.ok("reuse", f"qualified: layer loop, stored rows and recomputation differ by {errors}")


def _embedder(settings: Settings, parts: DoctorParts, findings: Findings) -> None:
    from ragkv.retrieval import Reranker, make_embedder

    with findings.checking("embedder"):
        embedder = make_embedder(settings.embedder)
        vectors = embedder.encode(["hello"])
        parts.embedder = embedder
        findings.ok("embedder", f"{embedder.identity.name}, vectors of {vectors.shape[1]}")
    if settings.reranker:
        with findings.checking("reranker"):
            reranker = Reranker(settings.reranker)
            reranker.scores("hello", ["hello"])
            findings.ok("reranker", reranker.source)


def _catalog(settings: Settings, parts: DoctorParts, findings: Findings) -> None:
    from ragkv.catalog import Catalog

    where = settings.catalog_address
    if isinstance(where, Path) and not settings.data.exists():
        findings.note("catalogue", f"none yet in {settings.data}: add documents with `ragkv ingest`")
        return
    with findings.checking("catalogue"):
        parts.catalog = catalog = Catalog.open(where)
        documents, chunks = catalog.count()
        report = findings.ok if documents else findings.note
        report("catalogue", f"{documents} documents, {chunks} chunks in {catalog.name}")


def _set_aside(catalog: Catalog, findings: Findings, forget: bool) -> None:
    """Print the documents that were set aside, and remove them if `forget`."""
    from ragkv.ingest.jobs import Jobs

    with findings.checking("set aside"):
        jobs = Jobs(catalog, 0)
        found = jobs.set_aside()
        for document in found:
            where = f"document {document.document_id!r} of collection {document.collection!r}, job {document.job_id}"
            findings.note(
                "set aside", f"{where}, {moment(document.updated)}: {document.reason.removeprefix('set aside: ')}"
            )
        if found and forget:
            findings.ok(
                "set aside", f"{jobs.forget_set_aside()} removed; they are not ingested until they are sent again"
            )
        elif found:
            findings.note("set aside", f"{len(found)} are not ingested; --forget-set-aside removes them from this list")
