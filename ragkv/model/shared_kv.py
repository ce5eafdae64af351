"""Layers without keys and values of their own, which read those of an earlier layer, as in Gemma 4's small models.

They stand behind all layers that own KV. Everything that names a layer means an owner: `Shape.layers`, plans, caches,
stored bytes and reports count owners alone, so each KV is stored, loaded, chosen, recomputed and counted once. A reader
attends with its own queries to the rows that the cache holds for its owner, so it reads what the plan kept there. It
writes none: the rows of a pass that give no logits end in front of the readers, and neither encoding nor repair runs
them. Sparse policies choose keys for owners; a reader reads all rows of its owner.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ragkv.errors import ModelUnsupported
from ragkv.model.layer_kinds import LayerKind


@dataclass(frozen=True)
class KVReader:
    """A layer that reads the KV of another one.

    Attributes:
        owner: number of that layer.
        kind: its attention.
    """

    owner: int
    kind: LayerKind


class SharedKV(UserDict[str, Any]):
    """Stands where layers leave KV for others and look for it. It keeps the form of KV, without rows.

    Attributes:
        layer: number of the layer that is read; None behind the last one, when nothing is noted any more.
        owners: the layer whose KV a layer looked for, by its number.
    """

    def __init__(self) -> None:
        """Make an empty one."""
        super().__init__()
        self.layer: int | None = None
        self.owners: dict[int, int] = {}
        self._left: dict[str, int] = {}

    def __setitem__(self, key: str, item: tuple[Tensor, Tensor]) -> None:
        """Note which layer leaves k, v [S, Hkv, T, d]."""
        if self.layer is not None:
            self._left[key] = self.layer
            self.data[key] = tuple(each.new_empty(1, each.shape[1], 0, each.shape[3]) for each in item)

    def __getitem__(self, key: str) -> tuple[Tensor, Tensor]:
        """Return k, v [1, Hkv, 0, d]; note which layer asks. Raises ModelUnsupported where nothing was left."""
        if key not in self._left:
            raise ModelUnsupported("it reads KV that no layer before it leaves")
        if self.layer is not None:
            self.owners[self.layer] = self._left[key]
        found: tuple[Tensor, Tensor] = self.data[key]
        return found

    def standing_in(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a layer is given, with this one in the place of what is empty."""
        return {name: self if isinstance(value, Mapping) and not value else value for name, value in named.items()}

    def check(self, layers: Sequence[tuple[LayerKind, tuple[int, int, int]]], states: bool) -> int:
        """Return how many layers have KV of their own.

        Args:
            layers: attention and heads of each layer.
            states: whether there are layers with a state, too.

        Raises:
            ModelUnsupported: owners do not stand in front of all readers, or a reader attends in another way.
        """
        owning = len(layers) - len(self.owners)
        for reader, owner in self.owners.items():
            if states or reader < owning or layers[reader] != layers[owner]:
                raise ModelUnsupported(f"layer {reader} of the model is not supported: it reads KV in a way of its own")
        return owning
