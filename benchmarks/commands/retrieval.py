"""`ragkv bench retrieval`: answers over one collection of all passages, by method and number of retrieved chunks."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands.common import show
from ragkv.cli.common import Device, Json, Model, progress, settings_from, tell, writable, write_json

if TYPE_CHECKING:
    from ragkv.config import Settings
    from ragkv.evaluation.sets import SetQuestion
    from ragkv.types import Document


def retrieval(
    longbench: Annotated[
        list[Path], typer.Option("--longbench", help="Questions and passages, in LongBench's format; again for more.")
    ],
    file: Json = None,
    top_k: Annotated[
        list[int] | None,
        typer.Option("--top-k", min=1, max=64, help="Chunks to retrieve; again for more. Default: 6, 24 and 48."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="As for ask; again for more. Default: full and scout.")
    ] = None,
    questions: Annotated[int, typer.Option(min=0, help="The first so many questions; 0: all.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Longest answer, in tokens.")] = 24,
    search: Annotated[
        bool, typer.Option("--search", help="Only search: how often the answer is found by words, vectors and both.")
    ] = False,
    table: Annotated[
        Path | None, typer.Option("--table", callback=writable, help="Write the table to this Markdown file.")
    ] = None,
    model: Model = None,
    device: Device = None,
) -> int:
    """The passages of all contexts as one collection: answers and first tokens, by method and --top-k."""
    given = settings_from(None, None, model, device)
    from benchmarks.retrieved import RetrievedParams, ask_collection, grid, read_collection
    from ragkv.engine.engine import Engine

    if search:
        return _search(given, read_collection(longbench), tuple(top_k or (6,)), questions, file, table)
    defaults = RetrievedParams()
    params = RetrievedParams(tuple(method or defaults.methods), tuple(top_k or defaults.top_k), questions, max_tokens)
    documents, asked = read_collection(longbench)
    with tempfile.TemporaryDirectory(prefix="ragkv-retrieval-") as folder:
        own = given.model_copy(update={"data": Path(folder), "store": "disk"})
        with Engine.open(own, tell) as engine, progress() as report:
            rows = ask_collection(engine, documents, asked, params, report)
            name = engine.model.name
    write_json(file, [dataclasses.asdict(row) for row in rows])
    count = questions or len(asked)
    show([(f"{name}: {count} questions about a collection of {len(documents)} passages", grid(rows), ())], table)
    return 0


def _search(
    settings: Settings,
    collection: tuple[list[Document], list[SetQuestion]],
    top_k: tuple[int, ...],
    questions: int,
    file: Path | None,
    table: Path | None,
) -> int:
    from benchmarks.recall import Splitting, measure_recall, recall_grid
    from ragkv.engine.open_model import load_model
    from ragkv.retrieval import make_embedder

    documents, asked = collection
    asked = asked[: questions or len(asked)]
    model, embedder = load_model(settings, tell), make_embedder(settings.embedder)
    splitting = Splitting(model.prompt, settings.chunk_tokens or model.profile.chunk_tokens)
    with tempfile.TemporaryDirectory(prefix="ragkv-recall-") as folder, progress() as report:
        rows = measure_recall(Path(folder), embedder, splitting, (documents, asked), top_k, report)
    name = embedder.identity.name
    write_json(file, {"embedder": name, "rows": [dataclasses.asdict(row) for row in rows]})
    count = f"{len(asked)} questions about a collection of {len(documents)} passages"
    show([(f"{name}: {count}", recall_grid(rows), ())], table)
    return 0
