"""The packaged embedder, all-MiniLM-L6-v2, as sentence-transformers computes it.

It is BERT, the mean of the outputs of its tokens, and a division by the length of that. sentence-transformers imports
what only training and evaluation need besides, scikit-learn, SciPy and a trainer among it: one and a half seconds of a
processor's time, which every `ragkv ask` would wait for. The vectors are the same to the last bit
(tests/retrieval/test_packaged.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

MAX_TOKENS = 256
"""Longest input, as the model's sentence_bert_config.json has it."""


class PackagedModel(nn.Module):
    """What the embedder uses of a SentenceTransformer.

    Attributes:
        tokenizer: Makes token ids.
        max_seq_length: Longest input, in tokens.
        prompts: None: the model was trained without.
    """

    max_seq_length = MAX_TOKENS
    prompts: Mapping[str, str] = {}

    def __init__(self, folder: str, device: str):
        """Load the model.

        Args:
            folder: Of its files.
            device: Torch device.

        Raises:
            OSError: A file is missing or damaged.
        """
        super().__init__()
        # Imported here because it takes seconds, and commands such as `ragkv ls` do not need it.
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        local = {"local_files_only": True}
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **local)
        self.bert = AutoModel.from_pretrained(folder, use_safetensors=True, **local).to(device).eval()

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        found: torch.device = self.bert.device
        return found

    def get_embedding_dimension(self) -> int:
        """Return the dimension of the vectors."""
        return int(self.bert.config.hidden_size)

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read texts.

        Args:
            features: What the tokenizer returns for n texts.

        Returns:
            `token_embeddings` [n, m, dimension], and `sentence_embedding` [n, dimension], of length 1.
        """
        outputs = self.bert(**features, return_dict=True).last_hidden_state
        mask = features["attention_mask"].unsqueeze(-1).to(outputs.dtype)
        exact = torch.float32 if outputs.dtype in (torch.float16, torch.bfloat16) else outputs.dtype
        count = torch.clamp(mask.sum(dim=1, dtype=exact), min=1e-9)
        mean = ((outputs * mask).sum(dim=1, dtype=exact) / count).to(outputs.dtype)
        return {"token_embeddings": outputs, "sentence_embedding": nn.functional.normalize(mean, p=2, dim=-1)}

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], *, batch_size: int, **_: Any) -> NDArray[np.float32]:
        """Return unit vectors [n, dimension]. Texts of similar length are read together, the longest first.

        Args:
            texts: The texts.
            batch_size: Texts that are read together.
            **_: What else a SentenceTransformer is told: the vectors are unit vectors anyway, and there is no prompt.
        """
        order, found = np.argsort([-len(text) for text in texts]), list[Tensor]()
        for start in range(0, len(order), batch_size):
            batch = [texts[number] for number in order[start : start + batch_size]]
            read = self.tokenizer(batch, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
            vectors = self({name: rows.to(self.device) for name, rows in read.items()})["sentence_embedding"]
            found.extend(nn.functional.normalize(vectors, p=2, dim=1).cpu())
        vectors = torch.stack([found[number] for number in np.argsort(order)])
        unit: NDArray[np.float32] = vectors.float().numpy()
        return unit
