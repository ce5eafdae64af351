"""A small cross-encoder, for tests of the reranker."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from ragkv.retrieval.embedder import _packaged_folder


def make_cross_encoder(folder: Path) -> Path:
    """Write a cross-encoder with random weights, behind the packaged embedder's tokenizer; returns the folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(_packaged_folder())
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=1,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder
