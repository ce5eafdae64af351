"""The parts that the doctor looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragkv.catalog import Catalog
    from ragkv.model.decoder import DecoderModel
    from ragkv.retrieval import TextEmbedder
    from ragkv.store import KVStore


@dataclass
class DoctorParts:
    """The parts that could be opened; None for those that could not."""

    model: DecoderModel | None = None
    embedder: TextEmbedder | None = None
    catalog: Catalog | None = None
    store: KVStore | None = None

    def close(self) -> None:
        """Close files and sockets."""
        for part in (self.catalog, self.store):
            if part is not None:
                part.close()
