"""The packaged embedder without sentence-transformers: the same vectors to the last bit, and no heavy imports."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from ragkv.kernels import packed_products
from ragkv.retrieval.embedder import BATCH, Embedder, _packaged_folder, _read
from ragkv.retrieval.packaged import MAX_TOKENS, PackagedModel

WORDS = "The harbour of Tarn was built in 1889 by Ada Brook. Zürich 東京 naïve [SEP] ½ 🙂".split()
TEXTS = [" ".join(WORDS[n % 5 : n % 5 + 1 + n % 11]) for n in range(BATCH + 7)]
TEXTS += ["", "x", "Who built the harbour of Tarn?", " ".join(WORDS * 60)]
"""More than a batch, of all lengths, one of them longer than the model reads."""


@pytest.fixture(scope="module", params=["float32", "bfloat16", "bfloat16, packed"])
def both(request: pytest.FixtureRequest) -> tuple[PackagedModel, SentenceTransformer]:
    """Our model and the library's, in bfloat16 where a CPU multiplies in it: no other is ever used so."""
    folder = str(_packaged_folder())
    own, theirs = PackagedModel(folder, "cpu"), SentenceTransformer(folder, device="cpu", local_files_only=True)
    for model in (own, theirs):
        if request.param != "float32":
            if not packed_products.multiplies_bfloat16():
                pytest.skip("this CPU does not multiply in bfloat16")
            model.bfloat16()
        if request.param.endswith("packed"):
            if not packed_products.supports_packing(model):
                pytest.skip("torch packs no products of this CPU")
            packed_products.pack_products(model)
    return own, theirs


def encoded(model: PackagedModel | SentenceTransformer, texts: list[str]) -> np.ndarray:
    return np.asarray(
        model.encode(
            texts,
            prompt=None,
            batch_size=BATCH,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
    )


@pytest.mark.parametrize("count", [1, 2, len(TEXTS)])
def test_vectors_are_those_of_the_library(both: tuple[PackagedModel, SentenceTransformer], count: int) -> None:
    own, theirs = both
    found = encoded(own, TEXTS[-count:])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, encoded(theirs, TEXTS[-count:]))


def test_so_are_the_outputs_of_tokens(both: tuple[PackagedModel, SentenceTransformer]) -> None:
    for mine, other in zip(*(_read(model, TEXTS) for model in both), strict=True):
        for own, theirs in zip(mine, other, strict=True):
            np.testing.assert_array_equal(own, theirs)


def test_it_is_described_as_the_library_describes_it(both: tuple[PackagedModel, SentenceTransformer]) -> None:
    own, theirs = both
    assert own.max_seq_length == theirs.max_seq_length == MAX_TOKENS
    assert own.get_embedding_dimension() == theirs.get_embedding_dimension() == 384
    assert own.device == theirs.device == torch.device("cpu")
    assert not any(theirs.prompts.values())
    assert own.tokenizer(TEXTS)["input_ids"] == theirs.tokenizer(TEXTS)["input_ids"]


def test_a_question_is_embedded_without_what_only_training_needs() -> None:
    # Old releases of transformers import scikit-learn themselves.
    heavy = "('sentence_transformers', 'transformers.trainer')"
    program = (
        "import sys; from ragkv.retrieval import make_embedder\n"
        "assert make_embedder('').encode_queries(['Who?']).shape == (1, 384)\n"
        f"sys.exit(', '.join(name for name in {heavy} if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_model_that_is_named_is_the_librarys() -> None:
    embedder = Embedder(str(_packaged_folder()))
    embedder.load()
    assert isinstance(embedder._model, SentenceTransformer)
    np.testing.assert_array_equal(embedder.encode_queries(TEXTS[:3]), Embedder().encode_queries(TEXTS[:3]))
