"""Wrapper tokens: trained embeddings in front of and behind every chunk, which leave the weights as they are.

    chunk      front …, prompt piece of the chunk, back …
    file       wrapper.safetensors: `front` [F, hidden], `back` [B, hidden]; its metadata name the base model's hash

A wrapper token has an id beyond every vocabulary, made of the hash of its file. Token ids are a part of the key of
stored KV, so KV that was made with one wrapper is never a hit for another. The idea is that of KV Packet (2604.13226).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ragkv.errors import ModelNotFound, ModelUnsupported
from ragkv.model.hashing import file_hash
from ragkv.model.locations import WRAPPER
from ragkv.model.profile import Profile, Repair, load_profile
from ragkv.model.supported import first_line

FIRST_ID = 2**30
"""Ids of wrapper tokens are FIRST_ID … 2^31 - 1; every vocabulary is smaller."""
MOST_TOKENS = 32
"""Most tokens of a wrapper, front and back together."""
_SLOTS = 2**25
EVERY_COLLECTION = ""


@dataclass(frozen=True)
class Wrapper:
    """The wrapper tokens of a chunk.

    Attributes:
        front: embeddings in front of a chunk, float32 [F, hidden].
        back: embeddings behind it, float32 [B, hidden].
        digest: hash of both, as hexadecimal digits.
        base: hash of the weights that they were trained with.
        scout_repair: `scout_repair` of the profile beside the file.
    """

    front: Tensor
    back: Tensor
    digest: str
    base: str = ""
    scout_repair: Repair = "kept"

    @property
    def front_ids(self) -> tuple[int, ...]:
        """Token ids in front of a chunk."""
        return tuple(range(self._first, self._first + len(self.front)))

    @property
    def back_ids(self) -> tuple[int, ...]:
        """Token ids behind a chunk."""
        start = self._first + len(self.front)
        return tuple(range(start, start + len(self.back)))

    @property
    def _first(self) -> int:
        return FIRST_ID + MOST_TOKENS * (int(self.digest[:12], 16) % _SLOTS)


@dataclass(frozen=True)
class Wrappers:
    """The wrapper of each collection; that of `EVERY_COLLECTION` is for all that have none of their own."""

    of: Mapping[str, Wrapper] = field(default_factory=dict)

    def find(self, collection: str) -> Wrapper | None:
        """Return the wrapper of a collection's chunks; None for none."""
        return self.of.get(collection) or self.of.get(EVERY_COLLECTION)


NO_WRAPPERS = Wrappers()


class WrappedEmbedding(nn.Module):
    """A model's embedding that knows wrapper tokens, too."""

    ids: Tensor
    rows: Tensor

    def __init__(self, base: Any, ids: Tensor, rows: Tensor):
        """Take the model's embedding, ids [W] in ascending order, and their embeddings [W, hidden]."""
        super().__init__()
        self.base = base
        self.register_buffer("ids", ids.to(base.weight.device), persistent=False)
        # A buffer: code that asks for the first parameter must get the model's own.
        self.register_buffer("rows", rows.to(base.weight.device), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The embeddings of the vocabulary."""
        weight: Tensor = self.base.weight
        return weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., hidden] of token ids [...]."""
        at = torch.searchsorted(self.ids, tokens.long()).clamp(max=len(self.rows) - 1)
        own = self.ids[at] == tokens
        plain = self.base(tokens.masked_fill(own, 0))
        return torch.where(own[..., None], self.rows[at].to(plain.dtype), plain)

    def train_rows(self) -> nn.Parameter:
        """Make the embeddings of wrapper tokens a parameter in float32. Returns it."""
        rows = nn.Parameter(self.rows.float())
        del self.rows
        self.rows = rows
        return rows


def is_wrapper_token(ids: Tensor) -> Tensor:
    """Return which token ids are those of wrapper tokens, bool like `ids`."""
    return ids >= FIRST_ID


def without_wrapper(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the token ids that stand for text."""
    return tuple(token for token in tokens if token < FIRST_ID)


def read_wrapper(folder: Path) -> Wrapper:
    """Read a wrapper.

    Raises:
        ModelNotFound: the file is missing or damaged.
    """
    path = folder.expanduser() / WRAPPER
    if not path.is_file():
        raise ModelNotFound(f"{folder} has no {WRAPPER}; make one with `ragkv tune DOCS --kind wrapper --out {folder}`")
    try:
        with safe_open(path, "pt") as file:
            front, back = (file.get_tensor(name).float() for name in ("front", "back"))
            base = (file.metadata() or {}).get("base", "")
    except (OSError, SafetensorError) as error:
        raise ModelNotFound(f"wrapper {path} is damaged ({first_line(error)}); copy it again") from None
    if front.dim() != 2 or back.dim() != 2 or not 0 < len(front) + len(back) <= MOST_TOKENS:
        raise ModelNotFound(f"wrapper {path} is damaged: it has to have 1 to {MOST_TOKENS} tokens")
    if not (front.isfinite().all() and back.isfinite().all()):
        raise ModelNotFound(f"wrapper {path} has numbers that are not finite; train it again")
    profile = path.with_name("profile.json")
    repair = load_profile(profile, Profile()).scout_repair if profile.is_file() else "kept"
    return Wrapper(front, back, file_hash(path), base, repair)


def save_wrapper(wrapper: Wrapper, folder: Path) -> None:
    """Write what `read_wrapper` reads, the profile excepted."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"front": wrapper.front, "back": wrapper.back}, folder / WRAPPER, {"base": wrapper.base})


def check_wrappable(config: Any) -> None:
    """Raise ModelUnsupported for a model whose layers look tokens up themselves: wrapper tokens are in no table."""
    if getattr(config, "hidden_size_per_layer_input", 0):
        raise ModelUnsupported("every layer of the model reads an input of each token, and wrapper tokens have none")


def install(weights: Any, wrappers: Wrappers, weights_hash: str) -> None:
    """Let a model embed wrapper tokens.

    Args:
        weights: a *ForCausalLM; its embedding is replaced.
        wrappers: the wrappers.
        weights_hash: hash of the model's weights, with its adapter.

    Raises:
        ModelUnsupported: a wrapper was trained for other weights, or the layers of the model read tokens themselves.
    """
    if wrappers.of:
        check_wrappable(weights.config)
    embedding = weights.model.embed_tokens
    tokens = dict[int, Tensor]()
    for collection, wrapper in wrappers.of.items():
        rows = torch.cat([wrapper.front, wrapper.back])
        if rows.shape[1] != embedding.weight.shape[1] or (wrapper.base and wrapper.base != weights_hash):
            of = f"of collection {collection!r} " if collection else ""
            raise ModelUnsupported(
                f"the wrapper {of}was trained for other weights (hash {wrapper.base[:12]}, these have "
                f"{weights_hash[:12]}); load the model and adapter that it was trained with, or tune one for these"
            )
        tokens |= dict(zip((*wrapper.front_ids, *wrapper.back_ids), rows, strict=True))
    if tokens:
        ids = sorted(tokens)
        rows = torch.stack([tokens[number] for number in ids])
        weights.model.embed_tokens = WrappedEmbedding(embedding, torch.tensor(ids), rows)
