"""A model's own code, called in parts: what enters its first layer, single layers, and what follows its last norm.

transformers asks for an attention function by name. Ours is registered here: the layer computes q, k and v as its
family does, calls it, and finishes as its family does. The rotation that the layer is given turns nothing, so the
function gets queries and keys before RoPE. Whoever calls the layer says by a context variable what attention is; where
nobody does, as in the model's own forward, the function is the family's own attention.

The parts before and behind the layers are the model's own forward, too, on a shallow copy without layers: multipliers
of embeddings and logits, soft caps and scales are the family's.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.modeling_outputs import MoeModelOutputWithPast

from ragkv.errors import ModelUnsupported
from ragkv.kernels.attention import index_to_device
from ragkv.model.layer_bodies import Attend
from ragkv.model.rotary import Rotation, rotary_name

NAME = "ragkv"
"""Name of the attention function in transformers."""
NORMS = ("norm", "final_layernorm", "embedding_norm")
"""What decoders call their last norm."""


class Stop(Exception):
    """Raised by an attention function to end a layer there: what follows is not needed."""


AttendHeads = Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]
"""Maps q [1, Hq, T, d], k, v [1, Hkv, T, d] and what else the layer says of its attention to rows [T, Hq, d]."""

_attention: ContextVar[AttendHeads | None] = ContextVar("attention", default=None)
_inputs: ContextVar[list[Tensor] | None] = ContextVar("inputs", default=None)
_masks: ContextVar[Callable[[Callable[..., Any]], Any] | None] = ContextVar("masks", default=None)


@contextmanager
def attending(attend: AttendHeads) -> Iterator[None]:
    """Within this context of the calling thread, layers attend by `attend`."""
    token = _attention.set(attend)
    try:
        yield
    finally:
        _attention.reset(token)


@contextmanager
def masking(make: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Within this context, a model's masks are what `make` returns for the function that says which keys are seen."""
    token = _masks.set(make)
    try:
        yield
    finally:
        _masks.reset(token)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls."""
    attend = _attention.get()
    if attend is None:
        own = sys.modules[type(module).__module__].eager_attention_forward
        return own(module, query, key, value, attention_mask, **given)[0], None
    return attend(query, key, value, given)[None], None


def _mask(*args: Any, **given: Any) -> Any:
    """The mask function that transformers calls."""
    make = _masks.get()
    return eager_mask(*args, **given) if make is None else make(given["mask_function"])


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


def use_own_attention(weights: Any) -> None:
    """Let a *ForCausalLM ask for our attention function. Its own forward computes the same as before."""
    weights.model.config._attn_implementation = NAME


def without_mask(mask_function: Callable[..., Any]) -> None:
    """Make no mask. See `masking`."""


def copy_with(module: Any, **children: nn.Module) -> Any:
    """Return a shallow copy of a module that shares everything with it but some children."""
    other = copy.copy(module)
    other.__dict__["_modules"] = {**module._modules, **children}
    return other


def norm_name(body: Any) -> str:
    """Return what a decoder calls its last norm; "" where it has none that is known."""
    return next((name for name in NORMS if hasattr(body, name)), "")


def check_parts(weights: Any) -> None:
    """Raise ModelUnsupported where a *ForCausalLM is not built of the parts that are called here."""
    body = getattr(weights, "model", None)
    lacking = [name for name in ("embed_tokens", "layers") if not hasattr(body, name)]
    lacking += [] if norm_name(body) else ["norm"]
    lacking += [] if rotary_name(body) else ["rotary_emb"]
    lacking += [] if hasattr(weights, "lm_head") else ["lm_head"]
    if lacking:
        raise ModelUnsupported(f"{type(weights).__name__} is not supported: it has no {', '.join(lacking)}")


class _Rows(MoeModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
    """Rows behind the last norm, as a decoder returns them. Whatever else a family's decoder returns is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given(nn.Module):
    """Stands where a *ForCausalLM has its decoder, and returns the rows that it is given."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> _Rows:
        return _Rows(last_hidden_state=inputs_embeds)


class _Noting(nn.Module):
    """Stands where a layer is that reads an input of its own, notes that input and returns its rows."""

    def __init__(self, block: Any, reads: str):
        super().__init__()
        self._names = list(inspect.signature(block.forward).parameters)
        self._reads, self._at = reads, self._names.index(reads)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        noted = _inputs.get()
        if noted is not None:
            noted.append(args[self._at] if len(args) > self._at else kwargs[self._reads])
        rows: Tensor = args[0] if args else kwargs[self._names[0]]
        return rows


class OwnEnds:
    """A model's own code before its first layer and behind its last norm.

    Attributes:
        norm: the last norm.
        logits: see `Ends`.
    """

    def __init__(self, weights: Any, reads: str = ""):
        """Wrap a *ForCausalLM whose attention is ours (`own_layers`); reads: see `Layers`."""
        name = norm_name(weights.model)
        self.norm = getattr(weights.model, name)
        layers = nn.ModuleList(_Noting(block, reads) for block in (weights.model.layers if reads else ()))
        self._before = copy_with(weights.model, layers=layers, **{name: nn.Identity()})
        self.logits = behind_body(weights)

    def embed(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Ends`."""
        noted = list[Tensor]()
        token = _inputs.set(noted)
        try:
            with masking(without_mask):
                rows: Tensor = self._before(input_ids=tokens[None], use_cache=False).last_hidden_state
        finally:
            _inputs.reset(token)
        return rows[0], torch.cat(noted) if noted else None


def behind_body(weights: Any) -> Callable[[Tensor], Tensor]:
    """Return what computes logits [O, vocabulary] of rows [O, hidden] behind the last norm: head, scale and caps."""
    behind = copy_with(weights, model=_Given())

    def logits(normed: Tensor) -> Tensor:
        found: Tensor = behind(inputs_embeds=normed[None], use_cache=False).logits
        return found[0]

    return logits


class OwnLayer:
    """A decoder layer that runs by its own forward."""

    def __init__(self, block: Any, given: Mapping[str, Any], rotation: Rotation, still: Tensor | None, reads: str = ""):
        """Wrap a layer of transformers.

        Args:
            block: the layer.
            given: what the model passes to it by name, apart from positions and rotation.
            rotation: its rotation.
            still: [1, 1, n]. Ones: the cos that turns nothing, in the model's dtype and on the layer's device; None
                where it takes no cos and sin.
            reads: the name by which it is given an input of its own; "" where it has none.
        """
        self._block, self._given, self._reads = block, dict(given), reads
        self._still = None if still is None else (still, torch.zeros_like(still))
        device = next(block.parameters()).device
        self._order = None if rotation.order is None else torch.tensor(rotation.order, device=device)

    def __call__(self, hidden: Tensor, positions: Tensor, attend: Attend, inputs: Tensor | None = None) -> Tensor:
        """Run the layer. See `LayerBody`."""
        given = self._given if inputs is None else {**self._given, self._reads: inputs[None]}
        kept: Tensor | None = None
        attended = False

        def attend_heads(query: Tensor, key: Tensor, value: Tensor, given: Mapping[str, Any]) -> Tensor:
            nonlocal kept, attended
            if attended:
                raise ModelUnsupported(f"{type(self._block).__name__} is not supported: it attends twice")
            attended = True
            q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
            if self._order is not None:
                q, k = q[..., self._order], k[..., self._order]
            rows, kept = attend(q, k, v)
            if not rows.shape[0]:
                raise Stop
            return rows if kept is None else rows.new_zeros(q.shape).index_copy_(0, kept, rows)

        turned = None
        if self._still is not None:
            turned = (self._still[0].expand(1, len(hidden), -1), self._still[1].expand(1, len(hidden), -1))
        try:
            with attending(attend_heads):
                at = index_to_device(positions, hidden.device)[None]
                x = run_block(self._block, hidden[None], at, turned, given)[0]
        except Stop:
            return hidden[:0]
        return x if kept is None else x[kept]


def run_block(
    block: Any, hidden: Tensor, positions: Tensor, rotation: tuple[Tensor, ...] | None, given: Mapping[str, Any]
) -> Tensor:
    """Run a layer of transformers on rows [S, T, hidden] at positions [S, T] with cos and sin [S, T, n].

    Args:
        block: the layer.
        hidden: the rows.
        positions: their positions.
        rotation: cos and sin; None where the layer takes none.
        given: what else the model passes to it by name.
    """
    found = block(hidden, **{**given, "position_ids": positions, "position_embeddings": rotation})
    rows: Tensor = found[0] if isinstance(found, tuple) else found
    return rows
