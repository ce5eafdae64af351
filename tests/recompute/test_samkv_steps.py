"""Every step of SamKV on examples that are computed by hand: digest, queries, budget, filter, rules 1 and 2, fusion."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ragkv.engine.prefill import Prefiller
from ragkv.engine.registry import make_method
from ragkv.errors import InputError
from ragkv.model.layer_pass import Pass, Step, write_rows
from ragkv.model.profile import Profile
from ragkv.model.rotary import rotate
from ragkv.recompute.analysis import analyse, low_outliers, outlier_tokens, stability
from ragkv.recompute.base import Piece, padding_for, rows_alive
from ragkv.recompute.compared import compared_vectors
from ragkv.recompute.digest import DigestParams, block_means, build_digest
from ragkv.recompute.samkv import SamKV, fuse, fuse_tokens, personalise, round_budget, score
from ragkv.types import Digest
from tests import tiny


def rows(*values: float) -> Tensor:
    """Return [n, 1, 1] float64: n tokens of one head with one dimension."""
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def one_layer(keys: list[tuple[float, float]], alpha: list[float], unimportance: list[float]) -> Piece:
    """Return a chunk of one layer and one head with d = 2 and four tokens a block."""
    digest = Digest(
        mean_keys=torch.tensor(keys, dtype=torch.float64)[None, :, None],
        local_query=torch.zeros(1, 1, 2, dtype=torch.float64),
        alpha=torch.tensor([alpha]),
        unimportance=torch.tensor([unimportance]),
        landmarks=(torch.arange(len(keys)) * 4 + 1)[None, :, None].int(),
        retrieval_keys=torch.zeros(0, 4 * len(keys), 2),
    )
    return Piece(4 * len(keys), 4, digest)


def layers(*pieces: Piece) -> Piece:
    """Stack chunks of one layer to a chunk of several layers."""
    digests = [piece.digest for piece in pieces]
    names = ("mean_keys", "local_query", "alpha", "unimportance", "landmarks")
    stacked = {name: torch.cat([getattr(digest, name) for digest in digests]) for name in names}
    return replace(pieces[0], digest=replace(digests[0], **stacked))


# Ingest.


def test_a_partial_last_block_is_averaged_over_its_real_tokens():
    assert block_means(rows(1, 3, 5, 7, 11)[None], 2).flatten().tolist() == [2, 6, 11]


def test_the_local_query_is_the_mean_over_the_tokens_of_the_local_blocks():
    q = rows(100, 100, 100, 100, 2, 4, 6)  # blocks of 2: the last two hold tokens 4, 5 and 6
    digest = build_digest([q], q[None], [(q[None], q[None])], DigestParams(block=2, local=2), scale=1.0)
    assert digest.local_query.flatten().tolist() == [4]
    assert digest.mean_keys.flatten().tolist() == [100, 100, 3, 6]


def test_salience_is_the_mean_attention_of_later_rows_and_the_largest_represents_a_block():
    """Keys 0, ln 2, 0, 0 and queries 1: rows see shares 1 | 1/3 2/3 | 1/4 2/4 1/4 | 1/5 2/5 1/5 1/5."""
    found = analyse(rows(1, 1, 1, 1)[None], rows(0, math.log(2), 0, 0)[None], block=2, before=0, scale=1.0)
    assert found.landmarks[0, :, 0].tolist() == [1, 2]
    expected = torch.tensor([(2 / 4 + 2 / 5) / 2, 1 / 5])
    torch.testing.assert_close(found.unimportance[0], expected)


def test_the_exponent_counts_the_keys_that_a_row_sees_with_the_prefix():
    """Uniform attention is 1 / x_i for x_i visible keys: the exponent is 1, with a prefix as well."""
    found = analyse(rows(*[0.0] * 24)[None], rows(*[0.0] * 29)[None], block=8, before=5, scale=1.0)
    assert found.alpha[0, :2].tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


def test_beta_is_the_block_with_the_best_mean_rank_and_not_that_with_the_smallest_mean_exponent():
    """Block 5 is extreme in layer 0 and last elsewhere. Block 7 is second in layer 0 and an outlier in the others."""
    alpha = torch.full((3, 20), 1.0) + torch.arange(20) * 1e-3
    alpha[0, 5], alpha[0, 7] = -900.0, 0.99
    alpha[1:, 5], alpha[1:, 7] = 2.0, -5.0
    assert float(alpha.mean(0).argmin()) == 5
    assert [7 in low_outliers(row.tolist()) for row in alpha] == [False, True, True]
    assert stability([alpha]) == [0, 1, 1]


# Queries.


def test_eq_1_takes_one_cosine_over_all_heads_or_one_per_head():
    """Heads (1, 0) and (0, 1); local (3, 0) and (4, 0): cosines 1 and 0 by head, 3 / (sqrt(2) · 5) together."""
    q_que = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    local = torch.tensor([[[3.0, 0.0], [4.0, 0.0]]], dtype=torch.float64)
    both = torch.stack([torch.zeros_like(local), local])
    flat = 3 / (math.sqrt(2) * 5)
    expected = {"flat": [[1 + 3 * flat, 0], [4 * flat, 1]], "head": [[4, 0], [0, 1]]}
    for cosine in ("flat", "head"):
        found = personalise(q_que, both, cosine)[0, 0]
        torch.testing.assert_close(found, torch.tensor(expected[cosine], dtype=torch.float64))


def test_the_question_is_the_mean_of_all_its_tokens():
    """Tokens (4, 0) and (0, 2) make (2, 1). Blocks 1 and 2 score 2 and -1, the anchor 0: P = 2/3, so k = 2.

    With the last token alone they score 0 and -2: the anchor is no less than the maximum, so k = ceil(0 · 2) = 0.
    """
    piece = one_layer([(0, 0), (1, 0), (0, -1), (0, 0), (0, 0)], [9, 1, 2, 9, 9], [9, 2, 1, 9, 9])
    question = torch.tensor([[[4.0, 0.0]], [[0.0, 2.0]]], dtype=torch.float64)
    assert SamKV(layers=(0,)).plan([piece], [question]).kept == (((0, 1, 2, 3, 4),),)
    assert SamKV(layers=(0,)).plan([piece], [question[-1:]]).kept == (((0, 3, 4),),)


# Budget and filter.


def test_eq_3_averages_over_all_stable_layers():
    """P is 0.5 in layer 0 and 0 in layer 1, with 4 middle blocks: k = ceil(0.25 · 4) = 1."""
    half = one_layer(
        [(0, 0), (1, 0), (-1, 0), (0, 0), (0, 0), (0, 0), (0, 0)], [9, 1, 2, 2, 2, 9, 9], [9, 2, 1, 2, 2, 9, 9]
    )
    none = one_layer(
        [(5, 0), (1, 0), (-1, 0), (0, 0), (0, 0), (5, 0), (5, 0)], [9, 1, 2, 2, 2, 9, 9], [9, 2, 1, 2, 2, 9, 9]
    )
    both, q = layers(half, none), torch.tensor([[[1.0, 0.0]]] * 2, dtype=torch.float64)
    assert SamKV(layers=(0,))._budget(both, q, both.digest.mean_keys, score(q, both.digest.mean_keys)) == 2
    assert SamKV(layers=(1,))._budget(both, q, both.digest.mean_keys, score(q, both.digest.mean_keys)) == 0
    assert SamKV(layers=(0, 1))._budget(both, q, both.digest.mean_keys, score(q, both.digest.mean_keys)) == 1


def test_k_max_is_the_most_important_block_and_k_min_the_least():
    """alpha is smallest at block 1 (score 3), the salience at block 3 (score -1); the fixed blocks score 1."""
    piece = one_layer([(1, 0), (3, 0), (9, 0), (-1, 0), (1, 0), (1, 0)], [0, 1, 2, 3, 0, 0], [0, 3, 2, 1, 0, 0])
    q = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    assert SamKV(layers=(0,))._budget(piece, q, piece.digest.mean_keys, score(q, piece.digest.mean_keys)) == math.ceil(
        (3 - 1) / (3 + 1) * 3
    )
    assert SamKV(layers=(0,), extremes="dynamic")._budget(
        piece, q, piece.digest.mean_keys, score(q, piece.digest.mean_keys)
    ) == math.ceil((9 - 1) / (9 + 1) * 3)


@pytest.mark.parametrize(
    ("rounding", "expected"), [("up", [0, 1, 2, 2, 2]), ("nearest", [0, 1, 2, 2, 1]), ("down", [0, 1, 1, 2, 1])]
)
def test_the_budget_is_rounded_as_the_method_says(rounding, expected):
    """A whole number stays what it is, also where float arithmetic is a little beside it."""
    assert [round_budget(x, rounding) for x in (0, 0.1 * 3 / 0.3, 1.5, 2 - 1e-12, 1.4)] == expected


def test_the_anchor_is_one_mean_over_tokens_or_a_mean_of_block_means():
    """Fixed blocks with keys 0, 3 and 9, the last one with one token: 12 / 3, or (4 · 0 + 4 · 3 + 9) / 9."""
    piece = one_layer([(0, 0), (8, 0), (3, 0), (9, 0)], [1] * 4, [1] * 4)
    piece = replace(piece, tokens=13)
    keys = piece.digest.mean_keys
    assert SamKV()._anchor(piece, keys).flatten().tolist() == [4, 0]
    assert SamKV(anchor="tokens")._anchor(piece, keys).flatten().tolist() == pytest.approx([21 / 9, 0])


def test_vectors_after_rope_are_those_of_their_places():
    """RoPE adds the position here. Chunks of 6 and 5 tokens in blocks of 4, so the question begins at position 11."""
    pieces = [replace(one_layer([(1, 0), (2, 0)], [1, 1], [1, 1]), tokens=count) for count in (6, 5)]
    question = [torch.zeros(2, 1, 2, dtype=torch.float64)]

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        return x + positions[:, None, None]

    q_que, q_loc, keys = compared_vectors(pieces, question, 1, rotate)
    assert q_que[0, 0].tolist() == [11.5, 11.5]
    assert q_loc[:, 0, 0, 0].tolist() == [4, 10]  # the middle of tokens 4 and 5, and of token 10 alone
    assert [part[0, :, 0, 0].tolist() for part in keys] == [[1 + 1, 2 + 4], [1 + 7, 2 + 10]]
    q_que, q_loc, keys = compared_vectors(pieces, question, 1, None)
    assert not q_que.any()
    assert not q_loc.any()
    assert [part[0, :, 0, 0].tolist() for part in keys] == [[1, 2], [1, 2]]


def test_comparing_after_rope_needs_the_models_rope():
    with pytest.raises(ValueError, match="RoPE"):
        SamKV(compare="after")


def test_scores_are_compared_across_chunks_by_the_norm_of_their_queries_or_from_0_to_1():
    piece = one_layer([(0, 0), (1, 0), (2, 0), (4, 0), (0, 0), (0, 0)], [1] * 6, [1] * 6)
    scores = torch.tensor([[9.0, 1, 2, 5, 9, 9]], dtype=torch.float64)
    found = SamKV()._normalised(piece, scores, torch.tensor([4.0], dtype=torch.float64))
    assert found[0, 1:4].tolist() == [0.25, 0.5, 1.25]
    found = SamKV(normalise="min_max")._normalised(piece, scores, torch.tensor([4.0], dtype=torch.float64))
    assert found[0, 1:4].tolist() == [0, 0.25, 1]


def test_a_chunk_with_a_longer_query_does_not_win_the_filter_by_its_length():
    """The local query (30, 0) of chunk 0 makes the query of chunk 1 (31, 0), while that of chunk 0 stays (1, 0).

    Each chunk retrieves one block: 1 and 27.9, divided by the norms 1 and .9. The filter keeps one of them.
    """
    first = one_layer([(0, 0), (1, 0), (-1, 0), (0, 0), (0, 0)], [9, 1, 2, 9, 9], [9, 2, 1, 9, 9])
    second = one_layer([(0, 0), (0.9, 0), (-1, 0), (0, 0), (0, 0)], [9, 1, 2, 9, 9], [9, 2, 1, 9, 9])
    far = torch.tensor([[[30.0, 0.0]]], dtype=torch.float64)
    first = replace(first, digest=replace(first.digest, local_query=far))
    question = [torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)]
    assert SamKV(layers=(0,)).plan([first, second], question).kept == (((0, 1, 3, 4), (0, 3, 4)),)


def test_the_filter_keeps_the_candidates_over_the_number_of_chunks_or_all_blocks():
    pieces = [one_layer([(0, 0)] * 6, [1] * 6, [1] * 6) for _ in range(2)]
    scores = [[0, 5, 4, 3, 0, 0], [0, 2, 1, 6, 0, 0]]
    assert SamKV()._filter(pieces, [2, 1], scores, size=3) == [(1,), (3,)]
    assert SamKV()._filter(pieces, [2, 1], scores, size=12) == [(1, 2), (3,)]


# Tokens to recompute.


def test_pauta_pools_the_stable_layers_and_needs_eleven_values():
    alpha = torch.full((2, 8), 1.0)
    alpha[1, 3] = 0.1
    representative = torch.arange(16).view(2, 8)
    assert outlier_tokens(alpha, representative, range(1, 7), (0, 1)) == (11,)  # 12 values, one far below
    assert outlier_tokens(alpha, representative, range(1, 7), (1,)) == (11,)  # 6 values: the smallest
    alpha[1, 3] = 0.999999
    alpha[0, 2] = 0.9
    alpha[0, 5] = 0.9
    assert outlier_tokens(alpha, representative, range(1, 7), (0, 1)) == ()


def test_fixed_blocks_and_outliers_of_kept_blocks_are_recomputed_and_no_others():
    """Layers 0 and 1 keep block 2 and block 1; the representative of the outlier is token 9, in block 2."""
    piece = one_layer([(1, 0)] * 6, [9, 2, 1, 2, 9, 9], [9] * 6)
    fixed = (0, 1, 2, 3, *range(16, 24))
    kept = (((0, 2, 4, 5),), ((0, 1, 4, 5),))
    found = SamKV(layers=(0,))._recompute([layers(piece, piece)], [(0, 4, 5)], kept)
    assert found == ((tuple(sorted({*fixed, 9})),), (fixed,))
    exact = SamKV(layers=(0,))._recompute([replace(layers(piece, piece), exact=True)], [(0, 4, 5)], kept)
    assert exact == (((),), ((),))


def test_rules_1_and_2_of_a_token_that_only_layer_2_recomputes():
    """Token 9 enters layers 0 to 2. Layer 0 keeps its block; layer 1 does not, so the block is padding there."""
    piece = one_layer([(1, 0)] * 6, [1] * 6, [1] * 6)
    recompute = (((0,),), ((0, 1),), ((0, 9),), ((0,),))
    kept = (((0, 2),), ((0,),), ((0, 2),), ((0,),))
    assert [layer[0] for layer in rows_alive(recompute)] == [(0, 1, 9), (0, 1, 9), (0, 9), (0,)]
    assert padding_for([piece], kept, recompute) == (((),), ((2,),), ((),), ((),))


# Fusion.


class OneLayer:
    """A cache of one layer that records what is written."""

    def __init__(self, k: Tensor, v: Tensor):
        self.stored = [k, v]

    def k(self, layer: int) -> Tensor:
        return self.stored[0]

    def v(self, layer: int) -> Tensor:
        return self.stored[1]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.written = k, v


def pair(x: float, y: float) -> Tensor:
    return torch.tensor([[[x, y]]], dtype=torch.float64)


def test_fusion_is_by_token_and_head_and_clamped():
    new = torch.tensor([[[1, 0], [1, 0]], [[0, 2], [-1, 0]]], dtype=torch.float64)
    old = torch.tensor([[[0.8, 0.6], [0, 1]], [[0, 1], [1, 0]]], dtype=torch.float64)
    expected = torch.tensor([[[0.96, 0.12], [0, 1]], [[0, 2], [1, 0]]], dtype=torch.float64)
    torch.testing.assert_close(fuse(new, old), expected)


def test_fusion_by_token_has_one_cosine_for_all_heads():
    """Heads (1, 0) to (1, 0) and (1, 0) to (0, 1): theta is 1 / 2 for both, where fusion by head has 1 and 0."""
    new = torch.tensor([[[1, 0], [1, 0]]], dtype=torch.float64)
    old = torch.tensor([[[1, 0], [0, 1]]], dtype=torch.float64)
    torch.testing.assert_close(fuse_tokens(new, old), torch.tensor([[[1, 0], [0.5, 0.5]]], dtype=torch.float64))
    torch.testing.assert_close(fuse(new, old), old)
    assert not fuse_tokens(new, -new).add(new).any()


def test_a_pass_fuses_new_rows_into_stored_rows_for_keys_and_values():
    """theta is the cosine .8: K is .8 (2, 0) + .2 (.8, .6), V is .6 (0, 5) + .4 (.8, .6)."""
    cache = OneLayer(pair(0.8, 0.6), pair(0.8, 0.6))
    slots = torch.tensor([0])
    step = Step(write=None, slots=slots, blend=1)
    write_rows(Pass(slots, slots, cache, [step], blend=fuse), 0, step, pair(2, 0), pair(0, 5))
    torch.testing.assert_close(cache.written[0], pair(1.76, 0.12))
    torch.testing.assert_close(cache.written[1], pair(0.32, 3.24))


def test_means_of_cached_keys_are_those_of_the_keys_at_their_places():
    """Of three chunks in a context: a cache has each key rotated to where it stands."""
    chunks = [tiny.tokens(count, count + 300) for count in (30, 26, 41)]
    model = tiny.model(profile=Profile(block=4, stable_layers=(2, 3), key_means="rotated"))
    encoded = [Prefiller(model, tiny.tokens(3, 99)).encode(chunk) for chunk in chunks]
    pieces = [Piece(len(kv.tokens), 4, kv.digest) for kv in encoded]
    method = make_method("samkv-fusion", model)
    asked = [torch.randn(5, model.shape.q_heads, model.shape.head_dim, dtype=torch.float64) for _ in range(4)]
    _, _, keys = compared_vectors(pieces, asked, 2, method.rotate, method.means)
    start = 0
    for kv, found in zip(encoded, keys, strict=True):
        rotary = model.rotary(torch.arange(start, start + len(kv.tokens)))
        turned = rotate(kv.k.double(), rotary)
        expected = torch.stack([part.mean(1) for part in turned.split(4, dim=1)], dim=1)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        start += len(kv.tokens)
    with pytest.raises(InputError, match="compare=before needs keys before RoPE"):
        make_method("samkv-fusion:compare=before", model)
