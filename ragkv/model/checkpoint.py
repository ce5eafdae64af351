"""Model checkpoints: find a folder, a GGUF file or a hub id, load it with its adapter, hash what it computes with.

gguf.py and model_cache.py convert GGUF files, published.py loads the weights that are served, adapter.py merges
adapters, source.py chooses the default model. These, own_forward.py and `benchmarks/shapes.py`, which makes random
weights, are the only importers of transformers' models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ragkv.errors import ModelNotFound, ModelUnsupported
from ragkv.kernels.packed_products import multiplies_bfloat16
from ragkv.model.adapter import Adapter, merge, read_adapter
from ragkv.model.gguf import is_gguf
from ragkv.model.hashing import joined_hash, weights_hash_of
from ragkv.model.locations import local_folder
from ragkv.model.model_cache import Notify, converted
from ragkv.model.placement import SPREAD, check_spreadable, remove_hooks
from ragkv.model.profile import Profile, default_profile, load_profile
from ragkv.model.published import load_weights, served_config
from ragkv.model.source import ModelSource
from ragkv.model.supported import attention_layers, check_supported, first_line
from ragkv.model.wrapper import EVERY_COLLECTION, NO_WRAPPERS, Wrappers, install, read_wrapper

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_COPIES = ["*/*", "consolidated*"]
"""Files of a hub model that are not read: the same weights in the form of their makers."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A model in memory.

    Attributes:
        weights: a *ForCausalLM in eval mode; of a model that reads images, too, its text part.
        tokenizer: its tokenizer.
        profile: its profile.
        name: the last part of its source, and its adapter.
        weights_hash: sha256 over config, tokenizer and weight files, and over the GGUF file and the adapter.
        wrappers: wrapper tokens that the model embeds.
    """

    weights: Any
    tokenizer: Any
    profile: Profile
    name: str
    weights_hash: str
    wrappers: Wrappers = NO_WRAPPERS


@dataclass(frozen=True)
class _Files:
    """Where a model's files are. weights_hash: sha256 over them where they were made of a GGUF file, else ""."""

    folder: Path
    weights_hash: str = ""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer. That of a GGUF file is loaded as it was written: a model's own class would change it."""
        kind: Any = transformers.PreTrainedTokenizerFast if self.weights_hash else transformers.AutoTokenizer
        return kind.from_pretrained(self.folder)


def load_checkpoint(
    source: str | ModelSource,
    device: str,
    dtype: str,
    profiles: Path | None,
    cache: Path | None = None,
    notify: Notify = lambda line: None,
) -> LoadedCheckpoint:
    """Load a local folder, a GGUF file or, when the source is no path, a hub id.

    Args:
        source: folder, GGUF file or hub id; or that with an adapter.
        device: a torch device, `auto` (a GPU where there is one) or `spread` (over all GPUs).
        dtype: a name in `DTYPES` or `auto` (see `auto_dtype`).
        profiles: folder where `ragkv calibrate` keeps profiles of models that have none beside their weights.
        cache: folder of converted GGUF files; None for the default one.
        notify: is told when a GGUF file is converted.

    Raises:
        ModelNotFound: there is no such model or adapter, or it cannot be loaded.
        ModelUnsupported: the architecture, the dtype, the placement or the adapter is not supported, or an adapter was
            trained for other weights.
        ConfigError: the profile is damaged, the cache cannot be written, or the model cannot be spread over GPUs.
    """
    source = ModelSource(source) if isinstance(source, str) else source
    adapter = read_adapter(Path(source.adapter).expanduser()) if source.adapter else None
    transformers.utils.logging.disable_progress_bar()
    files = _find_files(source, cache, notify)
    config = _read_config(source.model, files.folder)
    device, dtype = _resolved(device, dtype)
    try:
        weights, tokenizer = _read_weights(files.folder, config, device, DTYPES[dtype], adapter), files.tokenizer
    except KeyError:
        raise ModelUnsupported(f"dtype {dtype!r}: choose one of {', '.join(DTYPES)}") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFound(f"model {source.model!r}: cannot be loaded ({first_line(error)})") from None
    weights_hash = files.weights_hash or weights_hash_of(files.folder)
    if adapter:
        _tell_of_other_base(adapter, weights_hash, source.model, notify)
        weights_hash = joined_hash(weights_hash, adapter.digest)
    wrappers = Wrappers({collection: read_wrapper(Path(folder)) for collection, folder in source.wrappers})
    install(weights, wrappers, weights_hash)
    profile = default_profile(attention_layers(config), config.hidden_size, config.model_type)
    for path in [*_profiles_beside(files, source), *([profiles / f"{weights_hash}.json"] if profiles else [])]:
        if path.is_file():
            profile = load_profile(path, profile)
    return LoadedCheckpoint(weights, tokenizer, profile, source.shown, weights_hash, wrappers)


def _resolved(device: str, dtype: str) -> tuple[str, str]:
    """Return device and dtype, chosen where they are `auto`. Raises ConfigError for GPUs that cannot be spread over."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == SPREAD:
        check_spreadable()
    return device, auto_dtype(device) if dtype == "auto" else dtype


def _tell_of_other_base(adapter: Adapter, weights_hash: str, model: str, notify: Notify) -> None:
    """Tell that an adapter was trained on other weights, such as those of the hub's folder of a GGUF file."""
    if adapter.base and adapter.base != weights_hash:
        notify(
            f"adapter {adapter.folder} was trained on other weights than those of {model}: "
            "measure it with `ragkv calibrate --documents`, or tune one for these"
        )


def _profiles_beside(files: _Files, source: ModelSource) -> list[Path]:
    """Return where profiles may be. The later ones win: what was trained was trained for a prompt of its own."""
    common = [folder for collection, folder in source.wrappers if collection == EVERY_COLLECTION]
    folders = [files.folder, *(Path(folder).expanduser() for folder in (source.adapter, *common) if folder)]
    return [folder / "profile.json" for folder in folders]


def _find_files(source: ModelSource, cache: Path | None, notify: Notify) -> _Files:
    """Return the folder to load; a GGUF file is converted where that did not happen before."""
    if not is_gguf(source.model):
        return _Files(find_folder(source.model))
    cache = cache or Path("~/.cache/ragkv/models").expanduser()
    found = converted(Path(source.model).expanduser(), cache, notify, source.digest)
    return _Files(found.folder, found.weights_hash)


def _read_config(source: str, folder: Path) -> Any:
    """Return the configuration of what is served of a supported model."""
    try:
        config = served_config(transformers.AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(f"model {source!r}: no readable config.json ({first_line(error)})") from None
    check_supported(config)
    return config


def auto_dtype(device: str) -> str:
    """Return the dtype of weights and KV where none is set.

    It is bfloat16 on a GPU and on CPUs that multiply in bfloat16, which is several times faster there, and float32 on
    other CPUs.
    """
    if torch.device("cuda" if device == SPREAD else device).type != "cpu":
        return "bfloat16"
    return "bfloat16" if multiplies_bfloat16() else "float32"


def _read_weights(folder: Path, config: Any, device: str, dtype: torch.dtype, adapter: Adapter | None) -> Any:
    """Return the weights in eval mode on the device."""
    placement = "balanced" if device == SPREAD else None
    # With an adapter the weights are read in the dtype of their file, so that what is merged is rounded once.
    weights = load_weights(folder, config, "auto" if adapter else dtype, placement)
    weights = remove_hooks(weights) if device == SPREAD else weights
    if adapter:
        merge(weights, adapter, dtype)
    return (weights if device == SPREAD else weights.to(device)).eval()


def find_folder(source: str) -> Path:
    """Return the local folder of `source`, downloaded from the hub only if `source` is no path.

    Raises:
        ModelNotFound: there is no such folder, or the hub has no such model.
    """
    if (folder := local_folder(source)) is not None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=_PATTERNS, ignore_patterns=_COPIES))
    except Exception as error:  # the hub client raises many unrelated types for a missing model and for no network
        raise ModelNotFound(f"model {source!r}: no such folder, and the hub gave {first_line(error)}") from None
