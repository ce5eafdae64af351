"""Chunks that another model's tokenizer read: their token ids are made anew from their texts.

The catalogue holds the token ids that ingest made. A model that came later has other ids for the same text, and reads
the old ones as another text. `ragkv reindex` ingests such documents again; until then every question does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ragkv.catalog import Catalog
from ragkv.model.prompt import Prompt
from ragkv.model.wrapper import without_wrapper
from ragkv.types import Hit


def with_own_tokens(
    hits: Sequence[Hit],
    collection: str,
    catalog: Catalog,
    prompt: Prompt,
    fingerprint: str,
    *,
    wrapped: bool,
) -> list[Hit]:
    """Return the hits with token ids of the present model.

    Args:
        hits: Chunks as the catalogue holds them.
        collection: Their collection.
        catalog: Knows which model read each document.
        prompt: Makes the ids, with the wrapper tokens of the collection.
        fingerprint: Of the present model.
        wrapped: Whether wrapper tokens stay. They are for chunks that were encoded alone: a prefill in full has none.
    """
    prompt = prompt.of(collection)
    reader = prompt.reader(fingerprint)
    readers = catalog.readers(collection, {hit.chunk.document_id for hit in hits})
    # A document that was removed a moment ago has no reader; its chunk stays as it is.
    others = {document for document, other in readers.items() if other.partition("/")[0] != reader}
    found = [_read_again(hit, prompt) if hit.chunk.document_id in others else hit for hit in hits]
    return found if wrapped else without_wrappers(found)


def without_wrappers(hits: Sequence[Hit]) -> list[Hit]:
    """Return the hits without the wrapper tokens of their chunks."""
    return [replace(hit, chunk=replace(hit.chunk, tokens=without_wrapper(hit.chunk.tokens))) for hit in hits]


def _read_again(hit: Hit, prompt: Prompt) -> Hit:
    return replace(hit, chunk=replace(hit.chunk, tokens=prompt.chunk(hit.chunk.title, hit.chunk.text)))
