"""Reads what each layer of a model does: its mask, its rotation, its scores, and what the model gives to it.

Nothing is looked up by an architecture's name. The model's own forward runs once on layers that record what they are
given. Then each layer runs up to its attention, on a few random rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ragkv.errors import ModelUnsupported
from ragkv.model.layer_kinds import LayerKind
from ragkv.model.layer_recording import TOKENS, Recorded, record
from ragkv.model.own_forward import OwnLayer, Stop, attending, run_block
from ragkv.model.packed_heads import PackedHeads, stored_heads
from ragkv.model.recurrence import RecurrentLayer, RecurrentState
from ragkv.model.rotary import Rotation
from ragkv.model.rotation_probe import ROUNDING, SAMPLES, Codes, Turning, arrange, explains, find_turning, make_codes
from ragkv.model.shared_kv import KVReader, SharedKV
from ragkv.types import Shape

FARTHEST = 2**20
"""Longest window that is told from none."""
NOT_FOR_STATES = {"past_key_values", "position_ids", "position_embeddings", "attention_mask", "use_cache"}
"""What layers with a state are given and have no use for."""
UNDERSTOOD = {"scaling", "sliding_window", "softcap", "s_aux", "position_ids", "is_causal", "use_cache"}
"""What layers may tell their attention. Whatever else they tell it must be off."""


@dataclass(frozen=True)
class OwnLayers:
    """The layers of a model.

    Attributes:
        bodies: one a layer.
        kinds: their attention.
        rotations: the different rotations.
        shape: layers, heads and head size.
        recurrent: as in `Layers`, like what follows.
    """

    bodies: tuple[OwnLayer, ...]
    kinds: tuple[LayerKind, ...]
    rotations: tuple[Rotation, ...]
    shape: Shape
    recurrent: tuple[tuple[RecurrentLayer, ...], ...]
    readers: tuple[KVReader, ...]
    reads: str


@dataclass(frozen=True)
class _Heads:
    """What a layer hands to its attention: q [S, Hq, C, d], k and v [S, Hkv, C, d], and what it says besides."""

    q: Tensor
    k: Tensor
    v: Tensor
    given: Mapping[str, Any]


@torch.inference_mode()
def read_layers(weights: Any) -> OwnLayers:
    """Read the layers of a *ForCausalLM whose attention function is ours.

    Raises:
        ModelUnsupported: a layer does something that is not understood; the message has one line.
    """
    body = weights.model
    recorded = record(body)
    farthest = min(FARTHEST, body.config.max_position_embeddings)
    bodies, kinds, shapes = list[OwnLayer](), list[LayerKind](), list[tuple[int, int, int]]()
    rotations: dict[Rotation, int] = {}
    windows: dict[int, int | None] = {}
    recurrent: list[list[RecurrentLayer]] = [[]]
    reads, shared = _own_input(recorded.layers), SharedKV()
    for number, (block, named) in enumerate(zip(body.layers, map(shared.standing_in, recorded.layers), strict=True)):
        shared.layer = len(bodies)
        mask, turned = named.pop("attention_mask", None), named.pop("position_embeddings", None)
        with _of_layer(number):
            if (other := _recurrent(block, named, body)) is not None:
                recurrent[-1].append(other)
                continue
            if id(mask) not in windows:
                windows[id(mask)] = find_window(mask, farthest)
            named.pop(reads, None)
            given = {**_constants(named), "attention_mask": None}
            heads, rotation, still = _read_heads(block, given, turned, recorded, body)
            kinds.append(_kind(heads, rotations.setdefault(rotation, len(rotations)), windows[id(mask)]))
        shapes.append((heads.q.shape[1], heads.k.shape[1], heads.q.shape[3]))
        bodies.append(OwnLayer(block, given, rotation, still, reads))
        recurrent.append([])
    shared.layer = None
    if not bodies:
        raise ModelUnsupported("no layer of the model has attention, so there are no keys to store")
    owning = shared.check(list(zip(kinds, shapes, strict=True)), any(recurrent))
    shape, found = _shape(shapes[:owning]), tuple(map(tuple, recurrent)) if any(recurrent) else ()
    packed = [PackedHeads(kv, d, (shape.kv_heads, shape.head_dim)) for _, kv, d in shapes]
    alike = len(set(shapes)) == 1
    kinds = kinds if alike else [replace(kind, packed=each) for kind, each in zip(kinds, packed, strict=True)]
    readers = tuple(KVReader(shared.owners[number], kinds[number]) for number in range(owning, len(kinds)))
    return OwnLayers(tuple(bodies), tuple(kinds[:owning]), tuple(rotations), shape, found, readers, reads)


def _shape(shapes: Sequence[tuple[int, int, int]]) -> Shape:
    """Return the form in which rows are stored, for layers of these query heads, kv heads and head sizes."""
    queries = {heads for heads, _, _ in shapes}
    stored = stored_heads([(kv, d) for _, kv, d in shapes], max(queries))
    if stored is None or len(queries) > 1 or any(heads % kv for heads, kv, _ in shapes):
        words = " and ".join(f"{kv} KV heads of {d}" for _, kv, d in dict.fromkeys(shapes))
        raise ModelUnsupported(f"its layers differ in their heads ({words}), and rows of one form cannot hold them")
    return Shape(len(shapes), max(queries), *stored)


def _read_heads(
    block: Any, given: Mapping[str, Any], turned: Any, recorded: Recorded, body: Any
) -> tuple[_Heads, Rotation, Tensor | None]:
    """Return what a layer hands to its attention, how it turns keys, and the cos that turns nothing, if it takes any.

    Args:
        block: the layer.
        given: what else the model passes to it by name.
        turned: the cos and sin that it is given; None in a model whose keys do not turn.
        recorded: what the model's forward gave and asked.
        body: the decoder.
    """
    rows = _samples(block, body)
    if turned is None:
        heads = _coded(block, rows, given, None)
        return heads, Rotation(table=(-1,) * heads.q.shape[3]), None
    codes = make_codes(_width(turned))
    heads = _coded(block, rows, given, codes)
    return heads, _rotation(heads, codes, recorded, turned), rows.new_ones(1, 1, codes.cos.shape[1])


def _recurrent(block: Any, named: Mapping[str, Any], body: Any) -> RecurrentLayer | None:
    """Return a layer that has a state and no attention; None for one that has attention.

    Raises ModelUnsupported for one that has both.
    """
    attended: list[Any] = []

    def seen(query: Tensor, key: Tensor, value: Tensor, given: Mapping[str, Any]) -> Tensor:
        attended.append(query)
        raise Stop

    given = {name: value for name, value in named.items() if name not in NOT_FOR_STATES}
    made, state = RecurrentLayer(block, given), RecurrentState()
    with attending(seen), suppress(Stop):
        try:
            _, state = made(_samples(block, body)[0], state)
        except (TypeError, AttributeError):
            if not attended:
                return None
    if state.tail is None and state.recurrent is None:
        return None
    if attended:
        raise ModelUnsupported("it has both attention and a state")
    return RecurrentLayer(block, _constants(given))


@contextmanager
def _of_layer(number: int) -> Iterator[None]:
    """Name the layer in what is raised."""
    try:
        yield
    except ModelUnsupported as error:
        raise ModelUnsupported(f"layer {number} of the model is not supported: {error}") from None


def _own_input(layers: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the input of each row, beside the row itself, that all layers are given; "" for none."""
    names = [
        {name for name, value in named.items() if isinstance(value, Tensor) and value.shape[:-1] == (1, TOKENS)}
        for named in layers
    ]
    common = set.intersection(*names) if names else set()
    return common.pop() if len(common) == 1 else ""


def _constants(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a layer is given, apart from positions, if that is the same for all rows."""
    constants = {name: value for name, value in named.items() if name != "position_ids"}
    for name, value in constants.items():
        if not isinstance(value, bool | int | float | str | SharedKV | None):
            raise ModelUnsupported(f"it is given {name}, which is not understood")
    return constants


def _width(turned: Any) -> int:
    """Return how many entries the cos and sin that a layer is given have."""
    if not (isinstance(turned, tuple) and len(turned) == 2 and all(isinstance(each, Tensor) for each in turned)):
        raise ModelUnsupported("it is given no cos and sin of its positions")
    return int(turned[0].shape[-1])


def find_window(mask: Callable[..., Tensor] | None, farthest: int) -> int | None:
    """Return how many of the last keys a row sees.

    Args:
        mask: transformers' function of batch, head, row and key.
        farthest: longest window that is told from none.

    Returns:
        None where a row sees all keys up to its own.

    Raises:
        ModelUnsupported: it sees other keys.
    """
    if mask is None:
        raise ModelUnsupported("it has a mask of its own")
    rows = (farthest, farthest // 3, farthest // 7)
    zero, keys, counts = torch.zeros((), dtype=torch.int64), torch.arange(farthest + 2), list[int]()
    for row in rows:
        seen = mask(zero, zero, torch.tensor(row), keys)
        counts.append(int(seen.sum()))
        if not torch.equal(seen, (keys <= row) & (keys > row - counts[-1])):
            raise ModelUnsupported("its rows see neither all keys before them nor a window of them")
    if counts != [min(counts[0], row + 1) for row in rows]:
        raise ModelUnsupported("its rows see chunks of the input, not a window that moves with the row")
    return None if counts[0] > farthest else counts[0]


def _samples(block: Any, body: Any) -> Tensor:
    """Draw rows [S, 1, hidden], on a layer's device."""
    generator, device = torch.Generator().manual_seed(0), next(block.parameters()).device
    rows = torch.randn(SAMPLES, 1, body.config.hidden_size, generator=generator)
    return rows.to(device, body.embed_tokens.weight.dtype)  # a layer's weights may be in FP8


def _coded(block: Any, hidden: Tensor, given: Mapping[str, Any], codes: Codes | None) -> _Heads:
    """Run a layer up to its attention, on rows [S, 1, hidden], under each code; None gives it no cos and sin.

    Each code has a call of its own: products of the same rows differ in their last bits where they stand in a matrix.
    """
    found: list[_Heads] = []

    def seen(query: Tensor, key: Tensor, value: Tensor, given: Mapping[str, Any]) -> Tensor:
        found.append(_Heads(query, key, value, given))
        raise Stop

    positions = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    pairs = [None] if codes is None else list(zip(codes.cos.to(hidden), codes.sin.to(hidden), strict=True))
    for pair in pairs:
        turned = None if pair is None else tuple(each.expand(*hidden.shape[:2], -1) for each in pair)
        with attending(seen), suppress(Stop):
            run_block(block, hidden, positions, turned, given)
    if len(found) != len(pairs):
        raise ModelUnsupported("it has no attention whose keys could be stored")
    q, k, v = (torch.cat(each, 2) for each in zip(*((one.q, one.k, one.v) for one in found), strict=True))
    return _Heads(q, k, v, found[0].given)


def _rotation(heads: _Heads, codes: Codes, recorded: Recorded, turned: tuple[Tensor, Tensor]) -> Rotation:
    """Return how a layer turns queries and keys, from what its attention got under each code.

    A layer with dimensions that are always 0 may turn in several ways: as an earlier one does, if that is one of them.
    """
    q, k = (each.transpose(0, 1).flatten(0, 1) for each in (heads.q, heads.k))  # [H S, C, d]
    arguments, both = recorded.asked(turned), torch.cat([q, k]) if k.numel() else q
    values_stay = bool((heads.v - heads.v[:, :, :1]).norm() <= ROUNDING[heads.v.dtype] * heads.v.norm())

    def fits(turning: Turning) -> bool:
        return explains(turning, both, codes) and values_stay

    for earlier, its_rotation in recorded.known:
        if its_rotation.arguments == arguments and fits(earlier):
            return its_rotation
    turning = find_turning(both, codes)
    if turning is None or not fits(turning):
        raise ModelUnsupported("it does not turn pairs of its queries' and keys' dimensions, and nothing else")
    rotation = arrange(turning, turned[0][0], turned[1][0], arguments)
    if rotation is None:
        raise ModelUnsupported("its dimensions do not turn in pairs by one angle each")
    rotation = replace(rotation, grids=recorded.grids)
    recorded.known.append((turning, rotation))
    return rotation


def _kind(heads: _Heads, rotation: int, window: int | None) -> LayerKind:
    """Return a layer's attention by what it tells its attention function."""
    given = heads.given
    for name, value in given.items():
        if name not in UNDERSTOOD and value is not None and (isinstance(value, Tensor) or value):
            raise ModelUnsupported(f"it tells its attention {name}, which is not understood")
    if heads.v.shape != heads.k.shape:
        raise ModelUnsupported("its values have other heads than its keys")
    scale, softcap = given.get("scaling"), given.get("softcap") or None
    scale = heads.q.shape[3] ** -0.5 if scale is None else float(scale)
    return LayerKind(rotation, scale, window, softcap, given.get("s_aux"))
