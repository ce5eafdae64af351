"""The tokenizer: byte-level BPE with single digits, trained on generated text. Any string has tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo_model.bank import load
from tools.demo_model.task import Author

BOS, EOS, PAD = "<s>", "</s>", "<pad>"


def texts(seed: int, contexts: int) -> Iterator[str]:
    """Generated text of the kind that the model reads: chunks, questions, answers, and the words of the banks."""
    banks = load()
    author = Author(Random(seed), banks)
    for words in banks.lists.values():
        yield from (f" {word}" for word in words)
    for _ in range(contexts):
        context = author.context(500, 120, 6, 14)
        yield from (f"Document: {title}\n{text}\n" for title, text in context.chunks)
        yield from (f"Question: {asked.text}\nAnswer: {asked.answer}" for asked in context.asked)


def train(folder: Path, vocabulary: int, seed: int, contexts: int) -> None:
    """Train a tokenizer and save it in Hugging Face form. The same arguments give the same file."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(seed, contexts), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    fast.model_max_length = 8192
    fast.save_pretrained(folder)
