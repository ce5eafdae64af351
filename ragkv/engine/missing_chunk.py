"""A chunk that the store did not deliver, and its encoding (chunk_encoder.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.errors import StoreError
from ragkv.model.layer_pass import Pass
from ragkv.types import Chunk, ChunkKV


@dataclass
class MissingChunk:
    """A chunk that the store did not deliver.

    Attributes:
        chunk: The chunk.
        first: As for `ChunkEncoder.open`.
        reason: Why it was not delivered.
        until: End of the wait for another process, on the monotonic clock; 0 before it began.
    """

    chunk: Chunk
    first: bool
    reason: StoreError
    until: float = 0.0


@dataclass(eq=False)
class ChunkEncoding:
    """A missing chunk that questions wait for. kv: what came of its pass, as it would be loaded."""

    layer_pass: Pass
    kv: ChunkKV | None = None

    @property
    def ran(self) -> bool:
        """Whether the pass has run."""
        capture = self.layer_pass.capture
        return capture is not None and len(capture.k) == len(self.layer_pass.steps)
