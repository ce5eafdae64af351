"""`ragkv tune`: an adapter that lets a model read chunks that were encoded alone."""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.common import Data, Device, Model, check_model, err, fail, out, progress, settings_from

if TYPE_CHECKING:
    from ragkv.config import Settings
    from ragkv.model.prompt import Prompt
    from ragkv.tune.contexts import TextPassage
    from ragkv.types import Document


class Kind(StrEnum):
    """What is trained."""

    LORA = "lora"
    WRAPPER = "wrapper"


RATES = {Kind.LORA: 1.5e-4, Kind.WRAPPER: 3e-3}
"""Peak learning rates."""
STEPS, SECONDS = 600, 900.0
"""Where no number of steps is named: the training ends with the steps, or with the time."""
ROWS_TOKENS = 16384
"""Tokens of the rows of one forward pass, where the memory of a GPU allows it. A CPU takes a row at a time."""


def tune(
    paths: Annotated[list[Path], typer.Argument(help="Files and folders, as for `ragkv ingest`.", metavar="PATH...")],
    to: Annotated[Path, typer.Option("--out", help="Folder of the adapter. A stopped run there goes on.")],
    questions: Annotated[
        Path | None, typer.Option("--questions", help='JSON lines {"q": …, "a": […]?} to train with, besides rules.')
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimiser steps; default: 600, or as many as 15 minutes allow.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=256, help="Tokens of the rows of one forward pass; default: what memory allows.")
    ] = None,
    length: Annotated[int, typer.Option(min=256, help="Tokens of a row: chunks, questions and answers.")] = 2048,
    rank: Annotated[int, typer.Option(min=1, help="Rank of a LoRA adapter.")] = 32,
    rate: Annotated[
        float | None, typer.Option(min=1e-7, max=1.0, help="Peak learning rate; default: the kind's.")
    ] = None,
    kind: Annotated[
        Kind, typer.Option(help="lora: changes weights. wrapper: tokens around chunks, kilobytes for each collection.")
    ] = Kind.LORA,
    gold: Annotated[bool, typer.Option("--gold", help="Learn the answers, too, not only the model's own.")] = False,
    contexts: Annotated[int, typer.Option(min=0, help="Held-out contexts of the report; 0: no report.")] = 12,
    workers: Annotated[int, typer.Option(min=0, help="Processes that make rows.")] = 4,
    adapter: Annotated[Path | None, typer.Option("--adapter", help="Adapter to go on from.")] = None,
    data: Data = None,
    model: Model = None,
    device: Device = None,
) -> int:
    """Teach a model to answer over stored KV as it answers with full attention, from your own documents.

    Needs no answers: the model itself is the teacher. On several GPUs: `torchrun -m ragkv.cli tune …`.
    """
    if gold and kind is Kind.WRAPPER:
        return fail("--gold is for --kind lora: wrapper tokens leave the answers of full attention as they are", 2)
    settings = settings_from(data, None, model, device, adapter=str(adapter) if adapter else None)
    if not (find_spec("peft") and find_spec("accelerate")):
        return fail("tuning needs peft and accelerate; pip install 'accelerate>=1.15,<2' 'peft>=0.21,<1'", 2)
    check_model(settings)
    if to.exists() and not to.is_dir():
        return fail(f"{to} is no folder; name a new one for the adapter", 1)
    from ragkv.tune.contexts import check_enough
    from ragkv.tune.given import read_questions

    given = read_questions(questions) if questions else []
    documents = read_documents(paths, settings)
    if not documents:
        return fail(f"nothing to tune with in {', '.join(map(str, paths))}", 1)
    check_enough(len(documents))
    import torch

    from ragkv.engine.open_model import model_source
    from ragkv.model.checkpoint import load_checkpoint
    from ragkv.model.prompt import Prompt
    from ragkv.tune.options import TuneOptions
    from ragkv.tune.run import TuneRun, tune

    source = model_source(settings)
    loaded = load_checkpoint(source, "cpu", "auto", None, settings.model_cache_folder)
    passages = split_all(documents, Prompt(loaded.tokenizer, loaded.profile), loaded.profile.chunk_tokens)
    del loaded
    default = ROWS_TOKENS if torch.cuda.is_available() else length
    options = TuneOptions(
        steps=steps or STEPS,
        kind=kind.value,
        rows_tokens=max(tokens or default, length),
        lengths=((length, 1.0),),
        rank=rank,
        rate=rate or RATES[kind],
        seconds=0.0 if steps else SECONDS,
        teacher="self" if gold else "base",
        answers=1.0 if gold else 0.0,
        workers=workers,
        save_every=max(1, min(100, (steps or STEPS) // 2)),
    )
    run = TuneRun(source, to, options, settings.device, settings.model_cache_folder, report_contexts=contexts)
    console = err()
    with progress() as report:
        done = tune(run, passages, given, lambda line: console.print(line), report)
    out().print(f"{done.report}adapter    {to}, {done.adapter.steps} steps, {done.adapter.seconds:.0f} s")
    if done.adapter.gpu_bytes:
        out().print(f"memory     {done.adapter.gpu_bytes / 2**30:.1f} GiB of the GPU at most")
    if done.refused:
        return fail(f"not saved: {done.refused}; give more documents or questions, or train longer", 1)
    used = str(to) if kind is Kind.LORA else ",".join(filter(None, (settings.adapter, f"COLLECTION={to}")))
    out().print(f"use it     RAGKV_MODEL={settings.model or source.model} RAGKV_ADAPTER={used} ragkv serve")
    return 0


def read_documents(paths: list[Path], settings: Settings) -> list[Document]:
    """Return all documents, as ingest reads them; files that cannot be read are told on stderr. It needs no model."""
    from ragkv.config import IngestSettings
    from ragkv.ingest.loader import Rejected, load
    from ragkv.ingest.sandbox import allowance_of

    documents = []
    for item in load(paths, settings.max_document_bytes, allowed=allowance_of(settings.part(IngestSettings))):
        if isinstance(item, Rejected):
            fail(item.error, 1)
        else:
            documents.append(item)
    return documents


def split_all(documents: list[Document], prompt: Prompt, limit: int) -> list[TextPassage]:
    """Return the chunks of all documents, as ingest makes them."""
    from ragkv.ingest.chunker import split
    from ragkv.tune.contexts import TextPassage

    return [
        TextPassage(str(Path(document.id).parent), document.id, chunk.title, chunk.text)
        for document in documents
        for chunk in split(document, prompt, limit)
    ]
