"""What the methods of the papers share: all retrieved chunks join the context, and the model decides what is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ragkv.recompute.base import StatesBehind
from ragkv.recompute.evidence import BlockEvidence, Kind


@dataclass(frozen=True)
class AllChunks:
    """A method of the papers.

    Attributes:
        states: As in `Method`; the papers know no layers with a state.
    """

    chunks = 0
    states: StatesBehind = field(default="last", kw_only=True)

    @property
    def evidence(self) -> tuple[Kind, ...]:
        """The kinds of evidence that the method asks of pieces: none."""
        return ()

    def screen(self, found: Sequence[BlockEvidence]) -> tuple[int, ...]:
        """Return all chunks. See `Method.screen`."""
        return tuple(range(len(found)))
