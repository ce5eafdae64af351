"""Flex attention and SDPA compute the same rows; the quicker one is taken where both work."""

from __future__ import annotations

from random import Random

import pytest
import torch

from ragkv.model.decoder import DecoderModel
from ragkv.tune import attention
from ragkv.tune.attention import AttentionName, quicker, row_attention
from ragkv.tune.contexts import Context
from ragkv.tune.masks import full_mask, stored_mask
from ragkv.tune.rows import DropParams
from tests.clock import set_clock
from tests.tune.test_rows import ASKED, CHUNKS, batch, maker


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")  # its backward needs a GPU
@pytest.mark.parametrize("mask", [full_mask, stored_mask])
def test_flex_attention_is_sdpa(model: DecoderModel, mask: object) -> None:
    rows = batch(maker(model, DropParams(reuse=0.0)).row(Context(CHUNKS, ASKED), 512, Random(0)))
    found = {}
    try:
        for name in ("sdpa", "flex"):
            how = row_attention(name)
            model.body.set_attn_implementation(how.implementation)
            with torch.inference_mode():
                found[name] = model.body(
                    input_ids=rows.ids,
                    position_ids=rows.positions,
                    attention_mask=how.prepare(mask(rows), model.dtype),  # type: ignore[operator]
                    use_cache=False,
                ).last_hidden_state[rows.targets]
    finally:
        model.body.set_attn_implementation("sdpa")
    torch.testing.assert_close(found["flex"], found["sdpa"], rtol=1e-4, atol=1e-4)


def test_without_a_gpu_it_is_sdpa() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert quicker(lambda name: pytest.fail("nothing is tried"), print) == "sdpa"


def test_what_fails_is_not_taken_and_the_quicker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    set_clock(monkeypatch, lambda: clock[0], attention)

    def attempts(seconds: dict[AttentionName, float]) -> tuple[AttentionName, list[str]]:
        said: list[str] = []

        def attempt(name: AttentionName) -> None:
            if name not in seconds:
                raise RuntimeError(f"no kernel for {name}\nand a long trace")
            clock[0] += seconds[name]

        return quicker(attempt, said.append), said

    assert attempts({"sdpa": 2.0, "flex": 1.0})[0] == "flex"
    assert attempts({"sdpa": 1.0, "flex": 2.0})[0] == "sdpa"
    name, said = attempts({"sdpa": 1.0})
    assert (name, said[0]) == ("sdpa", "flex attention does not work here: no kernel for flex")
