"""What a run trains: a LoRA adapter on the projections, or wrapper tokens around every chunk.

lora       W + SCALE · B A in every layer; megabytes, merged when the model is loaded, so one for a whole server
wrapper    embeddings in front of and behind a chunk (model/wrapper.py); kilobytes, one for each collection
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ragkv.errors import ModelUnsupported
from ragkv.model.adapter import BASE, WEIGHTS
from ragkv.model.wrapper import (
    EVERY_COLLECTION,
    WrappedEmbedding,
    Wrapper,
    Wrappers,
    check_wrappable,
    install,
    save_wrapper,
)
from ragkv.tune.options import TuneOptions

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices that a LoRA adapter changes."""

SCALE = 2.0
"""A LoRA adapter adds SCALE · B A to a matrix, whatever its rank."""


class Adapted(Protocol):
    """A model with something that is trained, as peft names it."""

    def get_base_model(self) -> Any:
        """Return the causal language model."""
        ...

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """Let the model be what it was before, within a context."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all parameters; those that are trained require gradients."""
        ...


class WrappedModel(nn.Module):
    """A model whose wrapper tokens are trained. Rows without them (`masks.unwrapped`) read it as it was."""

    def __init__(self, model: Any, wrapper: Wrapper):
        """Take the model, whose own weights are frozen, and the tokens to begin with."""
        super().__init__()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        install(model, Wrappers({EVERY_COLLECTION: wrapper}), wrapper.base)
        self.model, self._front = model, len(wrapper.front)
        embedding: WrappedEmbedding = model.model.embed_tokens
        self.rows = embedding.train_rows()

    def get_base_model(self) -> Any:
        """See `Adapted`."""
        return self.model

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """See `Adapted`: the weights are what they were."""
        return nullcontext()

    def trained(self, base: str) -> Wrapper:
        """Return the tokens as they are now. base: hash of the weights."""
        rows = self.rows.detach().float().cpu()
        return Wrapper(rows[: self._front].contiguous(), rows[self._front :].contiguous(), "", base)


def new_wrapper(weights: Any, options: TuneOptions, base: str) -> Wrapper:
    """Return wrapper tokens to begin with: embeddings of tokens drawn from the vocabulary.

    Args:
        weights: a *ForCausalLM.
        options: How many tokens stand in front of and behind a chunk, and the seed.
        base: hash of the weights.

    Raises:
        ModelUnsupported: the model's layers read inputs that such tokens lack.
    """
    check_wrappable(weights.config)
    embedding = weights.model.embed_tokens
    draw = torch.Generator().manual_seed(options.seed)
    count = options.front + options.back
    drawn = torch.randint(weights.config.vocab_size, (count,), generator=draw)
    with torch.no_grad():
        rows = embedding(drawn.to(embedding.weight.device)).float().cpu()
    return Wrapper(rows[: options.front], rows[options.front :], "0" * 12, base)


def with_lora(model: Any, options: TuneOptions, start: Path | None) -> Any:
    """Return the model as a PeftModel with a trainable LoRA adapter.

    Args:
        model: A causal language model; its own weights are frozen.
        options: Rank of a new adapter.
        start: Folder of an adapter to go on from; None makes a new one, which changes nothing yet.

    Raises:
        ModelUnsupported: its layers have no projections of the usual names.
    """
    import peft

    with without_deprecations():
        return _with_lora(peft, model, options, start)


def _with_lora(peft: Any, model: Any, options: TuneOptions, start: Path | None) -> Any:
    from ragkv.tune.merged import CUSTOM

    if start is not None:
        known = peft.LoraConfig.from_pretrained(start)
        known.inference_mode = False
        known._register_custom_module(CUSTOM)
        return peft.PeftModel.from_pretrained(model, start, is_trainable=True, config=known)
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = [name for name in PROJECTIONS if name in linear]
    if not found:
        raise ModelUnsupported(
            f"the layers of {type(model).__name__} have none of the projections {', '.join(PROJECTIONS)}; "
            "tune wrapper tokens for it with --kind wrapper"
        )
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=int(SCALE * options.rank),
        target_modules=found,
        task_type=peft.TaskType.CAUSAL_LM,
    )
    config._register_custom_module(CUSTOM)
    torch.manual_seed(options.seed)
    return peft.get_peft_model(model, config)


def save_adapter(model: Adapted, out: Path, base: str) -> None:
    """Write what was trained, with the hash of the weights that it was trained on.

    A LoRA adapter is written in the dtype of the model's weights, which is what it is merged into.
    """
    if isinstance(model, WrappedModel):
        save_wrapper(model.trained(base), out)
        return
    lora = cast(Any, model)
    for value in lora.parameters():
        if value.requires_grad:
            value.data = value.data.to(lora.dtype)
    lora.save_pretrained(out, save_embedding_layers=False)  # else it looks for the base model on the hub
    (out / "README.md").unlink(missing_ok=True)  # peft's form for a model card, with nothing filled in
    path = out / WEIGHTS
    with safe_open(path, "pt") as file:
        facts = file.metadata() or {}
    save_file(load_file(path), path, {**facts, BASE: base})


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Hide what peft's and transformers' releases have to tell each other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module="torch|peft|transformers|accelerate")
        yield
