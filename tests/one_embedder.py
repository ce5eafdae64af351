"""One packaged embedder for all engines of a process.

Loading it takes as long as all else that opening an engine takes, and tests open hundreds of engines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from ragkv.kernels import packed_products

Load = Callable[[str, str, bool], Any]


def loading_once(load: Load) -> Load:
    """Return a `load` of embedder.py that loads the packaged model once; others are loaded as ever."""

    @cache
    def packaged(device: str, bfloat16: bool) -> Any:
        model, lock = load("", device, True), threading.Lock()
        encode = model.encode

        def encode_alone(*given: Any, **named: Any) -> Any:
            with lock:  # each embedder locks itself only
                return encode(*given, **named)

        model.encode = encode_alone
        return model

    def chosen(source: str, device: str, only_local: bool) -> Any:
        if source:
            return load(source, device, only_local)
        return packaged(device, packed_products.multiplies_bfloat16())

    return chosen
