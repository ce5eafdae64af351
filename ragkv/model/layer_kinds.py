"""What the attention of each layer is, beyond its weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ragkv.model.packed_heads import PackedHeads


@dataclass(frozen=True)
class LayerKind:
    """The attention of one layer.

    Attributes:
        rotation: number of the layer's rotation in `DecoderModel.rotations`.
        scale: factor of attention scores.
        window: how many of the last positions, its own included, a row sees; None for all.
        softcap: scores s become softcap · tanh(s / softcap); None where they stay.
        sinks: [Hq]. One logit a head that takes part in the softmax and has no value; None for none.
        packed: how the layer's heads lie in stored rows; None where these are its own.
    """

    rotation: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)
    packed: PackedHeads | None = None

    def pack(self, rows: Tensor) -> Tensor:
        """Return rows of the layer's heads as stored rows."""
        return rows if self.packed is None else self.packed.pack(rows)

    def unpack(self, rows: Tensor) -> Tensor:
        """Return stored rows as rows of the layer's heads."""
        return rows if self.packed is None else self.packed.unpack(rows)

    @property
    def plain(self) -> bool:
        """Whether it is the softmax of products over all keys, which sparse policies and our kernels compute."""
        return self.window is None and self.softcap is None and self.sinks is None
