"""The recipe of the bundled model: shape, prompt, data, stages. With the hardware it determines the weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from transformers import LlamaConfig

from ragkv.model.profile import Profile
from tools.demo_model.shape import Shape
from tools.demo_model.tokenizer import BOS


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes:
        steps: steps of one batch each.
        mix: share of the steps by row length.
        rate: peak learning rate, held for the share `hold` of the steps, then linear to 2%.
        warmup: steps of linear warm-up.
    """

    steps: int
    mix: dict[int, float]
    rate: float
    hold: float
    shape: Shape = field(default_factory=Shape)
    warmup: int = 150


@dataclass(frozen=True)
class Recipe:
    """A whole run.

    Attributes:
        batch: tokens of a step.
        context_weight: weight of the loss on context tokens; answers have weight 1.
        dropout: dropout of attention, in training.
    """

    stages: tuple[Stage, ...]
    seed: int = 1
    batch: int = 131072
    context_weight: float = 0.25
    vocabulary: int = 12288
    tokenizer_contexts: int = 6000
    layers: int = 12
    hidden: int = 384
    heads: int = 6
    kv_heads: int = 2
    mlp: int = 1024
    positions: int = 8192
    dropout: float = 0.15


_SHORT = Stage(steps=4000, mix={1024: 0.55, 2048: 0.45}, rate=2e-3, hold=1.0, warmup=1)
_MIDDLE = replace(_SHORT, steps=3400, mix={1024: 0.2, 2048: 0.4, 4096: 0.4})
_LONG = replace(_SHORT, steps=1600, mix={1024: 0.15, 2048: 0.3, 4096: 0.3, 8192: 0.25})
STAGES = (replace(_SHORT, warmup=150), _SHORT, _MIDDLE, _LONG, replace(_LONG, hold=0.0))
"""Rows grow longer from stage to stage. The learning rate stays at its peak until the last stage. A stage takes ten
minutes on one GPU, or a little more."""
BUNDLED = Recipe(STAGES)
PROMPT = Profile(
    block=16,
    chunk_tokens=512,
    prefix=BOS,
    chunk="Document: {title}\n{text}\n",
    question="Question: {question}\nAnswer:",
    stop=("\n",),
)


def config(recipe: Recipe, dropout: float = 0.0) -> LlamaConfig:
    """The model's sizes. dropout: of attention, in training only."""
    return LlamaConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden // recipe.heads,
        intermediate_size=recipe.mlp,
        max_position_embeddings=recipe.positions,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        attention_dropout=dropout,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
