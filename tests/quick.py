"""An engine for tests about what is stored: the real one, with a random model of two layers that reads in no time.

Store, catalogue, retrieval, digests and methods are real; only what the answers say means nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import transformers

from ragkv.catalog import Catalog
from ragkv.config import Settings, load_settings
from ragkv.engine.engine import Engine
from ragkv.engine.opening import OpenedParts
from ragkv.model.decoder import DecoderModel
from ragkv.model.profile import Profile, load_profile
from ragkv.retrieval import Retriever
from ragkv.store import open_store
from tests.ingest.reader import WordEmbedder
from tests.tiny import weights

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"


@cache
def quick_model(name: str = "quick") -> DecoderModel:
    """Two layers of random weights behind the bundled model's tokenizer; another name is another model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    profile = load_profile(TINY / "profile.json", Profile())
    profile = replace(profile, retrieval_heads=((0, 0), (1, 3)), stable_layers=(1,), chunk_tokens=64, block=8)
    with torch.random.fork_rng():
        made = weights(layers=2, vocabulary=len(tokenizer), max_positions=4096, seed=len(name))
    return DecoderModel(made, tokenizer, profile, name, weights_hash=name)


def quick_settings(data: Path, **settings: object) -> Settings:
    """Settings of a quick engine."""
    return load_settings(**{"data": data, "device": "cpu", "max_tokens": 4, "host_bytes": 0, **settings})


def quick_engine(data: Path, model: str = "quick", **settings: object) -> Engine:
    """Opened as Engine.open does, in milliseconds."""
    chosen = quick_settings(data, **settings)
    store = open_store(chosen.store, chosen.data, chosen.store_timeout, chosen.store_ttl, chosen.store_bytes)
    catalog = Catalog.open(chosen.catalog.get_secret_value() or chosen.data / "catalog.sqlite")
    retriever = Retriever(catalog, WordEmbedder(), chosen.data / "index")
    return Engine(chosen, OpenedParts(quick_model(model), store, catalog, retriever))
