"""`ragkv search`: passages for a query, without an answer. No model is loaded, only the embedder."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli import remote
from ragkv.cli.common import Collection, Data, Url, err, out, printable, settings_from
from ragkv.cli.questions_file import parse_filter
from ragkv.cli.show import place

if TYPE_CHECKING:
    from ragkv.config import Settings
    from ragkv.passages import SearchResult
    from ragkv.retrieval import SearchScope

_SHOWN = 400
"""Characters of a passage that people are shown."""
_BEFORE = 80
"""Characters of them before the first word of the query, about."""
_SOUGHT = 200
"""Most words of a passage that are compared."""


def search(
    query: Annotated[str, typer.Argument(help="Words, or a question.")],
    top_k: Annotated[int | None, typer.Option(min=1, max=64, help="Passages to find.")] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", metavar="KEY=VALUE", help="Only documents with this metadata, as in `ragkv ask`."),
    ] = None,
    documents: Annotated[
        list[str] | None, typer.Option("--document", metavar="ID", help="Only this document; may be given again.")
    ] = None,
    collection: Collection = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    data: Data = None,
    url: Url = None,
) -> int:
    """Search the documents for passages, by words and by meaning."""
    settings = settings_from(data, url=url)
    from ragkv.normalisation import normal_id
    from ragkv.retrieval import SearchScope

    scope = SearchScope(
        collection, parse_filter(filters or []), tuple(map(normal_id, documents)) if documents else None
    )
    count = top_k or settings.top_k
    found = remote.search(settings, query, scope, top_k) if settings.url else _search(settings, query, scope, count)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), ensure_ascii=False))
    else:
        _print(found)
    return 0


def _search(settings: Settings, query: str, scope: SearchScope, top_k: int) -> SearchResult:
    from ragkv.catalog import Catalog
    from ragkv.config import ViewSettings
    from ragkv.errors import NotFound
    from ragkv.retrieval import Retriever, make_embedder, make_reranker, open_earlier

    if not (settings.catalog.get_secret_value() or settings.data.exists()):
        raise NotFound(f"there are no documents in {settings.data}; add some with `ragkv ingest`")
    catalog = Catalog.open(settings.catalog_address)
    try:
        reranker = make_reranker(settings.reranker)
        embedder, folder = make_embedder(settings.embedder), settings.data / "index"
        parameters = Retriever.parameters_of(settings.part(ViewSettings), catalog)
        retriever = Retriever(catalog, embedder, folder, parameters, reranker, open_earlier)
        return retriever.find_passages(query, scope, top_k)
    finally:
        catalog.close()


def excerpt(text: str, query: str) -> str:
    """Return the part of a passage that has most words of a query, on one line; the first of equals."""
    line, words = " ".join(text.split()), set(re.findall(r"\w{3,}", query.lower()))
    found = [(word.start(), word[0]) for word in re.finditer(r"\w+", line.lower()) if word[0] in words][:_SOUGHT]
    if len(line.lower()) != len(line) or len(line) <= _SHOWN:
        found = []
    begins = [0, *(max(0, at - _BEFORE) for at, _ in found)]
    start = max(begins, key=lambda begin: len({word for at, word in found if begin <= at < begin + _SHOWN}))
    start = start and line.find(" ", start) + 1
    return f"{'…' * (start > 0)}{line[start : start + _SHOWN]}{'…' * (start + _SHOWN < len(line))}"


def _print(found: SearchResult) -> None:
    from rich.text import Text

    console, report = out(), found.report
    for number, passage in enumerate(found.passages, 1):
        words = "" if passage.word_score is None else f"  words {passage.word_score:.2f}"
        scores = f"  {passage.score:.3f}  similarity {passage.similarity:.2f}{words}"
        title = printable(passage.title or passage.document_id)
        console.print(Text.assemble((f"[{number}] ", "cyan"), (title, "bold"), (scores, "dim")))
        console.print(Text(f"    {printable(place(dataclasses.asdict(passage)))}", style="dim"))
        console.print(Text(f"    {printable(excerpt(passage.text, found.query))}"))
    if not found.passages:
        console.print("no passage matches")
    times = report.timings_ms
    how = "all" if report.exact else "by a graph"
    err().print(
        f"{report.chunks} chunks compared, {how} · words {times.words:.0f} ms · embedding {times.embed:.0f} ms · "
        f"vectors {times.vectors:.0f} ms · {times.total:.0f} ms in all",
        style="dim",
    )
