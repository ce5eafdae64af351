"""Wrapper tokens: what stands around a chunk's tokens, and what the model embeds for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ragkv.engine.retokenise import without_wrappers
from ragkv.errors import ConfigError, ModelNotFound
from ragkv.model.decoder import DecoderModel
from ragkv.model.locations import read_adapters
from ragkv.model.prompt import Prompt
from ragkv.model.wrapper import (
    FIRST_ID,
    MOST_TOKENS,
    WrappedEmbedding,
    Wrapper,
    Wrappers,
    read_wrapper,
    save_wrapper,
    without_wrapper,
)
from ragkv.types import Chunk, Hit


def wrapper(front: int = 3, back: int = 2, seed: int = 0, digest: str = "ab" * 32) -> Wrapper:
    rows = torch.randn(front + back, 8, generator=torch.Generator().manual_seed(seed))
    return Wrapper(rows[:front], rows[front:], digest, "base")


@pytest.fixture
def prompt(model: DecoderModel) -> Prompt:
    return Prompt(model.tokenizer, model.profile, Wrappers({"laws": wrapper()}))


def test_a_collections_chunks_stand_between_its_tokens(prompt: Prompt) -> None:
    plain, wrapped = prompt.chunk("Tarn", "A harbour."), prompt.of("laws").chunk("Tarn", "A harbour.")
    own = wrapper()
    assert wrapped == (*own.front_ids, *plain, *own.back_ids)
    assert without_wrapper(wrapped) == plain
    assert prompt.of("manuals") is prompt
    assert min(own.front_ids) >= FIRST_ID


def test_a_wrapper_for_every_collection_gives_way_to_a_collections_own(model: DecoderModel) -> None:
    common, own = wrapper(digest="01" * 32), wrapper(digest="02" * 32)
    prompt = Prompt(model.tokenizer, model.profile, Wrappers({"": common, "laws": own}))
    assert (prompt.wrapper, prompt.of("manuals").wrapper, prompt.of("laws").wrapper) == (common, common, own)


def test_the_reader_of_a_document_names_the_wrapper(prompt: Prompt) -> None:
    assert prompt.reader("f00") == "f00"
    assert prompt.of("laws").reader("f00") == "f00+abababababababab"


def test_texts_and_places_leave_them_out(prompt: Prompt) -> None:
    own, text = prompt.of("laws"), "A harbour with a light. " * 6
    plain, wrapped = prompt.chunk("Tarn", text), own.chunk("Tarn", text)
    assert "".join(own.blocks(wrapped, 8)) == "".join(prompt.blocks(plain, 8))
    ends = own.token_ends("Tarn", text, wrapped)
    assert (ends[3:-2] == prompt.token_ends("Tarn", text, plain)).all()
    assert (ends[:3] < 0).all()


def test_hits_of_a_prefill_in_full_have_none(prompt: Prompt) -> None:
    tokens = prompt.of("laws").chunk("Tarn", "A harbour.")
    hit = Hit(Chunk("a#0", "a", 0, "Tarn", "A harbour.", tokens), 1.0, 0)
    (found,) = without_wrappers([hit])
    assert found.chunk.tokens == prompt.chunk("Tarn", "A harbour.")


def test_the_embedding_is_the_models_but_for_them() -> None:
    base, own = nn.Embedding(10, 8), wrapper()
    ids = (*own.front_ids, *own.back_ids)
    rows = torch.cat([own.front, own.back])
    embedding = WrappedEmbedding(base, torch.tensor(ids), rows)
    tokens = torch.tensor([[ids[4], 3, ids[0]], [9, ids[2], 0]], dtype=torch.int32)
    found = embedding(tokens)
    expected = torch.stack(
        [torch.stack([rows[4], base.weight[3], rows[0]]), torch.stack([base.weight[9], rows[2], base.weight[0]])]
    )
    torch.testing.assert_close(found, expected)


def test_other_tokens_have_other_ids(tmp_path: Path) -> None:
    for seed in (0, 1):
        save_wrapper(wrapper(seed=seed), tmp_path / str(seed))
    first, second = read_wrapper(tmp_path / "0"), read_wrapper(tmp_path / "1")
    assert not {*first.front_ids, *first.back_ids} & {*second.front_ids, *second.back_ids}
    assert first.digest != second.digest


def test_ids_fit_32_bits() -> None:
    last = wrapper(MOST_TOKENS // 2, MOST_TOKENS // 2, digest="f" * 64)
    assert max(last.back_ids) < 2**31


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "make one with `ragkv tune"),
        (b"no safetensors", "is damaged"),
        (wrapper(0, 0), "1 to 32 tokens"),
        (wrapper(MOST_TOKENS, 1), "1 to 32 tokens"),
        (Wrapper(torch.full((1, 8), torch.nan), torch.zeros(1, 8), ""), "not finite"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, made: Wrapper | bytes | None, words: str) -> None:
    if isinstance(made, bytes):
        (tmp_path / "wrapper.safetensors").write_bytes(made)
    elif made is not None:
        save_wrapper(made, tmp_path)
    with pytest.raises(ModelNotFound, match=words):
        read_wrapper(tmp_path)


def test_the_setting_names_folders(tmp_path: Path) -> None:
    save_wrapper(wrapper(), tmp_path / "w")
    common = str(tmp_path / "w")
    assert read_adapters("") == ("", ())
    assert read_adapters("my-lora") == ("my-lora", ())
    assert read_adapters(common) == ("", (("", common),))
    assert read_adapters(f"my-lora, laws=a ,manuals=b,{common}") == (
        "my-lora",
        (("laws", "a"), ("manuals", "b"), ("", common)),
    )
    for setting in ("one,two", "laws=a,laws=b", f"{common},{common}"):
        with pytest.raises(ConfigError, match="name one"):
            read_adapters(setting)
