"""Tokenizers of GGUF files cut text into the words of llama.cpp: what it gives for each text stands here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

from ragkv.errors import ModelUnsupported
from ragkv.model.decoder import DecoderModel
from ragkv.model.gguf_tokenizer import save_tokenizer
from ragkv.model.plain_text import plain_encoder
from tests import written_gguf
from tests.written_gguf import write_gguf

CODE = "def f(x):\n\treturn x**2  # ok\n\n\n    if a:\r\n  b"
CODE_WORDS = "def; f;(x;):\n;\treturn; x;**;2; ; #; ok;\n\n\n;   ; if; a;:\r\n; ; b"
QWEN = {
    CODE: CODE_WORDS,
    "I'm HE'LL it'S don'T 'twas \u2019s": "I;'m; HE;'LL; it;'S; don;'T; ';twas; \u2019;s",
    "\u4e1c\u4eac 2024\u5e7412\u6708\u3001\u4e16\u754c\u3002\ud55c\uad6d\uc5b4": (
        "\u4e1c\u4eac; ;2;0;2;4;\u5e74;1;2;\u6708;\u3001\u4e16\u754c;\u3002\ud55c\uad6d\uc5b4"
    ),
    "\U0001f600\u200d\U0001f467 1\ufe0f\u20e3 \u2708\ufe0f!!": (
        "\U0001f600\u200d\U0001f467; ;1;\ufe0f\u20e3; \u2708\ufe0f!!"
    ),
    "1234567 12,345.67 \u0663\u0664 \xbd": "1;2;3;4;5;6;7; ;1;2;,;3;4;5;.;6;7; ;\u0663;\u0664; ;\xbd",
    "e\u0301le \u0915\u094d\u0937": "e;\u0301le; \u0915;\u094d\u0937",
    "  a  \n\n  \n b \t ": " ; a;  \n\n  \n; b; \t ",
    "\xa0\u3000x<|im_end|></s>": "\xa0;\u3000x;<|;im;_end;|></;s;>",
}
LLAMA = {
    CODE: CODE_WORDS,
    "1234567 12,345.67 \u0663\u0664 \xbd": "123;456;7; ;12;,;345;.;67; ;\u0663\u0664; ;\xbd",
    "e\u0301le": "e;\u0301le",
}
GOLDEN = [
    *(("qwen2", *each) for each in QWEN.items()),
    *(("llama-bpe", *each) for each in LLAMA.items()),
    ("qwen35", "e\u0301le \u0915\u094d\u0937 \u2708\ufe0f!", "e\u0301le; \u0915\u094d\u0937; \u2708;\ufe0f;!"),
    ("qwen35", "12 it'S", "1;2; it;'S"),
]


def test_a_vocabulary_that_transformers_reads_as_unigram_is_refused(tmp_path: Path) -> None:
    read = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(Unigram([("a", -1.0), ("ab", -2.0)])))
    with pytest.raises(ModelUnsupported, match=r"cuts text otherwise than llama\.cpp .* install transformers 5\.23"):
        save_tokenizer(read, None, tmp_path)


def loaded(folder: Path, rule: str, architecture: str = "qwen2") -> Any:
    """Return the tokenizer of a file with this rule, as a model is loaded with it."""
    weights = written_gguf.weights(architecture)
    path = write_gguf(folder / "a.gguf", weights, architecture, metadata={"tokenizer.ggml.pre": rule})
    return DecoderModel.load(str(path), "cpu", "float32", cache=folder / "cache").tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    rules = {rule for rule, _, _ in GOLDEN}
    return {rule: loaded(tmp_path_factory.mktemp(rule), rule) for rule in rules}


@pytest.mark.parametrize(("rule", "text", "words"), GOLDEN)
def test_words_are_those_of_llama_cpp(tokenizers: dict[str, Any], rule: str, text: str, words: str) -> None:
    backend = tokenizers[rule].backend_tokenizer
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    expected = [bytewise.pre_tokenize_str(word)[0][0] for word in words.split(";")]
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == expected


def test_letters_are_read_as_they_stand_and_come_back(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["qwen2"]
    for text in ("e\u0301", "\u212a\u0161 caf\xe9", "\ufb01"):
        assert tokenizer.decode(plain_encoder(tokenizer)(text)) == text


def test_a_word_of_the_vocabulary_is_one_token_where_llama_cpp_looks_words_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = [*written_gguf.vocabulary(), "boat"]  # no merge makes it
    monkeypatch.setattr(written_gguf, "vocabulary", lambda: words)
    for rule, count in (("llama-bpe", 1), ("dbrx", 3)):
        (tmp_path / rule).mkdir()
        tokenizer = loaded(tmp_path / rule, rule, "llama")
        assert len(tokenizer("boat", add_special_tokens=False)["input_ids"]) == count, rule


def test_loading_warns_of_no_wrong_pattern(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded(tmp_path, "qwen2")
    assert "regex" not in caplog.text
