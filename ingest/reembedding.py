"""The change to another embedder: every chunk is embedded again, collection by collection, while searches go on.

What is embedded is stored batch by batch, so a restart goes on where the last process stopped. A collection changes in
one transaction when the vectors of all its chunks are there (ragkv/catalog/embedders.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from ragkv.ingest.engine_contract import IngestEngine

BATCH = 4
"""Chunks that are embedded while questions wait."""


def reembed_steps(engine: IngestEngine) -> Iterator[str]:
    """Embed everything again that another embedder has embedded.

    `Catalog.aim_embedder` must have been called with the present embedder.

    Yields:
        After each batch, and after each collection: the name of the collection that has changed, else "".

    Raises:
        EmbedderChanged: Another process changes the vectors to another embedder.
        ModelNotFound: The embedder cannot be loaded.
        StoreFull: The disk is full.
    """
    catalog, embedder = engine.catalog, engine.retriever.embedder
    identity = embedder.identity
    while collections := catalog.stale_collections(identity):
        collection, after = collections[0], 0
        while passages := catalog.unembedded(collection, after, BATCH):
            embedded = embedder.encode_passages([(passage.title, passage.text) for passage in passages])
            rows = [passage.row for passage in passages]
            catalog.store_next_vectors(rows, embedded.vectors, identity)
            catalog.store_segments(dict(zip(rows, embedded.segments, strict=True)), identity)
            after = passages[-1].row
            yield ""
        # Not complete where another process has added a document meanwhile. Then the rest is embedded, too.
        if catalog.swap_vectors(collection, identity):
            engine.retriever.views.refresh(collection)
            yield collection
