"""Checkpoints as they are published: the text part of a multimodal one, and weights in FP8 or MXFP4.

Many models are published as a class that reads images, too (`…ForConditionalGeneration`). Only its text part is
served, so only that is loaded. Quantised weights are multiplied out when they are loaded: the layer loop, adapters and
`RAGKV_WEIGHTS` work on plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ragkv.errors import ModelNotFound, ModelUnsupported

_TEXT_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
"""What weights of a text part are called in multimodal checkpoints, and what they are called in the text model."""

_READ = "FP8 (fp8, or compressed-tensors with 8-bit float weights), MXFP4, unquantised folders and GGUF files are read"


def served_config(config: Any) -> Any:
    """Return the configuration of what is served of a model: of a multimodal one the text part.

    Args:
        config: a transformers configuration as AutoConfig reads it.

    Raises:
        ModelUnsupported: transformers has no text model for the text part.
    """
    text = config.get_text_config(decoder=True)
    if text is config:
        return config
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        name = (config.architectures or [type(config).__name__])[0]
        raise ModelUnsupported(f"architecture {name}: its text part {text.model_type!r} cannot be loaded by itself")
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__]
    text.tie_word_embeddings = config.tie_word_embeddings
    if quantised := getattr(config, "quantization_config", None):
        text.quantization_config = quantised
    return text


def load_weights(folder: Path, config: Any, dtype: torch.dtype | str, placement: str | None) -> Any:
    """Load the weights that are served, quantised ones multiplied out.

    Args:
        folder: a model folder.
        config: its `served_config`.
        dtype: dtype of all weights, or `auto` for that of the files.
        placement: `device_map` of transformers.

    Returns:
        A *ForCausalLM.

    Raises:
        ModelNotFound: the folder lacks weights of the model.
        ModelUnsupported: the weights are quantised in a form that is not read.
        OSError, ValueError, RuntimeError: transformers cannot load the folder.
    """
    names = dict(_TEXT_NAMES)
    if quantised := getattr(config, "quantization_config", None):
        config.quantization_config = _multiplied_out(quantised, names)
        if not find_spec("accelerate"):
            raise ModelUnsupported(
                f"{folder}: reading quantised weights needs a package: pip install 'accelerate>=1.15,<2'"
            )
    with _quiet():
        weights, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            device_map=placement,
            key_mapping=names,
            output_loading_info=True,
        )
    if missing := sorted(told["missing_keys"]):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ModelNotFound(f"{folder} lacks weights of its model ({missing[0]}{more}); download it again")
    # Of quantised folders, transformers leaves what was not quantised in the dtype of the file.
    return weights.to(dtype) if quantised and isinstance(dtype, torch.dtype) else weights


def _multiplied_out(quantised: Any, names: dict[str, str]) -> dict[str, Any]:
    """Return the settings with which transformers multiplies weights out; names of scales may be added to `names`.

    Raises ModelUnsupported.
    """
    given: Mapping[str, Any] = quantised if isinstance(quantised, Mapping) else quantised.to_dict()
    method = str(given.get("quant_method"))
    if method in ("fp8", "mxfp4"):
        return {**given, "dequantize": True}
    if method == "compressed-tensors":
        weights = [group.get("weights") or {} for group in (given.get("config_groups") or {}).values()]
        kinds = {(each.get("type"), each.get("num_bits")) for each in weights}
        if kinds == {("float", 8)}:
            # The same numbers as fp8 under another name: a scale a row, a block or a matrix, multiplied.
            names[r"\.weight_scale$"] = ".weight_scale_inv"
            return {"quant_method": "fp8", "dequantize": True}
        method = f"{method} ({', '.join(sorted(f'{bits}-bit {kind}' for kind, bits in kinds))})"
    raise ModelUnsupported(f"weights quantised by {method} are not read; {_READ}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from listing the weights of other parts; what is missing is an error here."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
