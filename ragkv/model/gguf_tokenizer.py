"""The tokenizer of a GGUF file: it cuts text as llama.cpp does, which the file was made for.

A file names the rule that cuts text into words, and holds vocabulary and merges. transformers reads the latter. What it
makes of the rule depends on its version, and a loaded tokenizer of a model's own class gets that class's rule and
normaliser in place of what was saved. So the rule is set here, and the tokenizer is saved as one of no model's class.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

from ragkv.errors import ModelUnsupported

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}" + _REST.replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST

_WORDS = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe", "lfm2"), _LLAMA3),
}
"""What is one word, by `tokenizer.ggml.pre` (llama.cpp, llm_tokenizer_bpe in llama-vocab.cpp). With another name, the
tokenizer stays what transformers reads."""

_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2")
"""Names with which a word of the vocabulary is one token, whatever the merges make of it."""


def save_tokenizer(tokenizer: Any, rule: str | None, folder: Path) -> None:
    """Write the tokenizer of a GGUF file into a folder.

    Args:
        tokenizer: what transformers reads from the file, its special tokens set.
        rule: `tokenizer.ggml.pre` of the file.
        folder: where; AutoTokenizer loads it as it is.

    Raises:
        ModelUnsupported: older versions of transformers read merges as a Unigram model, and cut text into letters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer) and isinstance(backend.model, Unigram):
        raise ModelUnsupported(
            f"transformers {version('transformers')} cuts text otherwise than llama.cpp with the vocabulary of this "
            "file; install transformers 5.23 or later, or use a folder of the model"
        )
    if rule not in _WORDS or not isinstance(backend, Tokenizer):
        tokenizer.save_pretrained(folder)
        return
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS[rule]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if rule in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    names = {f"{name}_token": getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
    # The flag keeps transformers from a warning that is meant for files of Mistral.
    saved = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, fix_mistral_regex=False, **names
    )
    saved.chat_template = tokenizer.chat_template
    saved.save_pretrained(folder)
