"""Properties of RoPE that make storing keys before rotation correct. Oracles O2, O3, O4."""

import pytest
import torch

from ragkv.model.rotary import Rotary, rotate
from tests import tiny

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
KEYS = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def rotary_at(kind, positions, scaled=True):
    """Return cos and sin in float64 from the model's own frequencies."""
    module = tiny.weights(rope_parameters=ROPES[kind]).model.rotary_emb
    angle = torch.as_tensor(positions, dtype=torch.float64)[:, None] * module.inv_freq.double()
    angle = torch.cat([angle, angle], dim=-1)
    factor = module.attention_scaling if scaled else 1.0
    return Rotary(angle.cos() * factor, angle.sin() * factor)


@pytest.mark.parametrize("kind", ROPES)
def test_a_rotation_moves_a_rotated_key_when_scaling_is_applied_once(kind):
    p, delta = torch.arange(6) * 7, 90
    moved = rotate(rotate(KEYS, rotary_at(kind, p)), rotary_at(kind, [delta] * 6, scaled=False))
    torch.testing.assert_close(moved, rotate(KEYS, rotary_at(kind, p + delta)), rtol=0, atol=1e-12)


def test_scaling_twice_is_wrong_for_yarn():
    p = torch.arange(6) * 7
    twice = rotate(rotate(KEYS, rotary_at("yarn", p)), rotary_at("yarn", [90] * 6))
    assert (twice - rotate(KEYS, rotary_at("yarn", p + 90))).abs().max() > 0.05


@pytest.mark.parametrize("kind", ROPES)
def test_the_inverse_rotation_restores_the_key(kind):
    forward = rotary_at(kind, torch.arange(6) * 11)
    scale = forward.cos.square()[0, 0] + forward.sin.square()[0, 0]
    back = rotate(rotate(KEYS, forward), Rotary(forward.cos / scale, -forward.sin / scale))
    torch.testing.assert_close(back, KEYS, rtol=0, atol=1e-12)


def test_a_mean_commutes_with_one_rotation_and_extremes_do_not():
    rotation = rotary_at("default", [33] * 6)
    rotated, one = rotate(KEYS, rotation), Rotary(rotation.cos[:1], rotation.sin[:1])
    torch.testing.assert_close(
        rotated.mean(0, keepdim=True), rotate(KEYS.mean(0, keepdim=True), one), rtol=0, atol=1e-12
    )
    for extreme in (torch.amax, torch.amin):
        assert (extreme(rotated, 0, keepdim=True) - rotate(extreme(KEYS, 0, keepdim=True), one)).abs().max() > 0.1
