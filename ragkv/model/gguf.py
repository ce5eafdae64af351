"""GGUF files: convert one into a folder of config, tokenizer and bfloat16 weights that transformers loads.

transformers reads the configuration and the tokenizer. The tensors are dequantised here, one at a time, because what
transformers makes of them depends on its version and on which kernels are installed: it may leave them packed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from ragkv.errors import ModelNotFound, ModelUnsupported
from ragkv.model.gguf_architectures import ARCHITECTURES, join_experts, own_names, restored
from ragkv.model.gguf_tokenizer import save_tokenizer
from ragkv.model.locations import GGUF
from ragkv.model.supported import first_line
from ragkv.model.tied_weights import EMBEDDINGS, OUTPUT, tied_copy

if TYPE_CHECKING:
    from gguf import GGUFReader

BYTES_PER_WEIGHT = 2
"""Converted weights are bfloat16. Four- to eight-bit weights lose nothing that matters: a scale of a GGUF block has 11
bits and a quantised number at most 8, and bfloat16 keeps 8. Weights of 16 or 32 bits are rounded."""

_FREQUENCIES, _LONG_ROPE = "rope_freqs.weight", "rope_factors"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE scaling of Llama 3.1 to 3.3. A GGUF file holds only what follows from it, one divisor a frequency."""


def is_gguf(source: str) -> bool:
    """Return whether a model setting names a GGUF file."""
    return source.lower().endswith(GGUF)


def convert(source: Path, folder: Path, opened: GGUFReader | None = None) -> None:
    """Write config, tokenizer and weights of a GGUF file into an empty folder.

    Args:
        source: the GGUF file.
        folder: an existing folder; several files are written there.
        opened: the same file, where it is open already: opening a large vocabulary takes seconds.

    Raises:
        ModelNotFound: the file is no GGUF file, is damaged, or a package that reads it is missing.
        ModelUnsupported: its architecture, RoPE scaling or quantisation is not supported.
        OSError: the folder cannot be written.
    """
    reader = opened or open_gguf(source)
    architecture = _check_architecture(source, reader)
    # Alone in a folder: files beside the source belong to other models.
    link = folder / "source.gguf"
    link.symlink_to(source.resolve())
    try:
        config = transformers.AutoConfig.from_pretrained(folder, gguf_file=link.name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=link.name)
    except Exception as error:  # what transformers raises for unexpected metadata has any type
        if isinstance(error, OSError) and error.errno:
            raise
        raise ModelNotFound(f"{source}: transformers cannot read its metadata ({first_line(error)})") from None
    finally:
        link.unlink()
    _complete(source, config, reader, architecture)
    copy = tied_copy(reader)
    config.tie_word_embeddings = bool(copy) or _tensor(reader, OUTPUT) is None
    expected = _expected(config)
    names = own_names(expected, architecture, config.num_hidden_layers)
    tensors = dict(_tensors(source, reader, config, architecture, names, copy))
    join_experts(tensors, expected)
    _check_tensors(source, tensors, expected, config)
    _set_special_tokens(tokenizer, reader)
    save_tokenizer(tokenizer, _value(reader, "tokenizer.ggml.pre"), folder)
    _write_config(folder, config, reader)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def open_gguf(source: Path) -> GGUFReader:
    """Open a GGUF file; its tensors are mapped, not read.

    Raises:
        ModelNotFound: it is no GGUF file, is cut short or otherwise damaged, or the package gguf is missing.
    """
    if not find_spec("gguf"):
        raise ModelNotFound(f"{source}: reading it needs the package gguf: pip install 'gguf>=0.18,<1'")
    from gguf import GGUFReader

    try:
        with source.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelNotFound(f"{source} is no GGUF file; give a .gguf file of llama.cpp, a model folder or a hub id")
        return GGUFReader(source)
    except OSError as error:
        raise ModelNotFound(f"{source} cannot be read ({error.strerror}); give the path of a .gguf file") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, UnicodeDecodeError) as error:
        raise ModelNotFound(f"{source} is damaged or cut short ({first_line(error)}); download it again") from None


def parameters(reader: GGUFReader) -> int:
    """Return the number of weights, embeddings that the output layer shares counted once."""
    copy = tied_copy(reader)
    return sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name != copy)


def _value(reader: GGUFReader, key: str) -> Any:
    """Return a metadata value; None where there is none."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _check_architecture(source: Path, reader: GGUFReader) -> str:
    """Return the architecture. Raises ModelUnsupported for one that cannot be converted or served."""
    name = str(_value(reader, "general.architecture"))
    if name not in ARCHITECTURES:
        raise ModelUnsupported(f"{source}: architecture {name!r} is not supported; use {', '.join(ARCHITECTURES)}")
    if _value(reader, f"{name}.expert_count") and not ARCHITECTURES[name].experts:
        raise ModelUnsupported(f"{source}: experts of {name} are not supported; use a dense model, or qwen3moe")
    scaling = _value(reader, f"{name}.rope.scaling.type") or "none"
    if scaling not in ("none", *ARCHITECTURES[name].scaled):
        raise ModelUnsupported(f"{source}: its RoPE scaling {scaling!r} is not read; use the model's original folder")
    if any(tensor.name.startswith(_LONG_ROPE) for tensor in reader.tensors):
        raise ModelUnsupported(f"{source}: its RoPE depends on the prompt's length, so stored keys cannot be re-used")
    return name


def _complete(source: Path, config: Any, reader: GGUFReader, architecture: str) -> None:
    """Set what transformers leaves out: sizes of heads and experts, scaled RoPE, no window where the file has none."""
    if size := _value(reader, f"{architecture}.attention.key_length"):
        config.head_dim = int(size)
    if not _value(reader, f"{architecture}.attention.sliding_window"):
        config.sliding_window = None
    factors = _tensor(reader, _FREQUENCIES)
    if factors is not None:
        theta = config.rope_parameters["rope_theta"]
        given = torch.tensor(factors.data.tolist(), dtype=torch.float64)
        rope = {**_LLAMA3, "factor": float(given.max())}
        expected = _divisors(theta, 2 * len(given), rope)
        if expected.shape != given.shape or not torch.allclose(expected, given, rtol=1e-3):
            raise ModelUnsupported(f"{source}: its RoPE frequencies are not Llama 3's; use the model's original folder")
        config.rope_parameters = {"rope_type": "llama3", "rope_theta": theta, **rope}
    if size := _value(reader, f"{architecture}.expert_feed_forward_length"):
        config.moe_intermediate_size = int(size)
    if architecture in ("gemma2", "gemma3"):
        _complete_gemma(config, reader, architecture)
    config.architectures, config.dtype = [ARCHITECTURES[architecture].model], "bfloat16"


def _complete_gemma(config: Any, reader: GGUFReader, architecture: str) -> None:
    """Set what llama.cpp knows of Gemma by the size of the model, and the scaled RoPE of its full layers."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    largest = layers == {"gemma2": 46, "gemma3": 62}[architecture]  # of 27 billion weights
    config.query_pre_attn_scalar = config.hidden_size // heads if largest else config.head_dim
    if _value(reader, f"{architecture}.rope.scaling.type") == "linear":
        factor = float(_value(reader, f"{architecture}.rope.scaling.factor"))
        config.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": factor}


def _divisors(theta: float, size: int, rope: dict[str, float]) -> Tensor:
    """Return what Llama 3's scaling divides each RoPE frequency by: [size / 2]."""
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - share) / factor + share)


def _tensor(reader: GGUFReader, name: str) -> Any:
    """Return a tensor; None where there is none."""
    return next((tensor for tensor in reader.tensors if tensor.name == name), None)


def _tensors(
    source: Path, reader: GGUFReader, config: Any, architecture: str, names: Mapping[str, str], copy: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name that transformers uses and the weights in bfloat16, tensor by tensor, without the copy."""
    from gguf import dequantize

    for tensor in reader.tensors:
        if tensor.name in (_FREQUENCIES, copy):
            continue
        # Of two copies, the finer one is the embeddings, whichever it is.
        stored = EMBEDDINGS if copy and tensor.name == OUTPUT else str(tensor.name)
        if stored not in names:
            raise ModelUnsupported(f"{source}: tensor {stored} is of no supported architecture; use a plain model")
        try:
            weights = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ModelUnsupported(f"{source}: {kind} tensors cannot be read; use a Q4, Q5, Q6 or Q8 file") from None
        if not weights.isfinite().all():
            raise ModelNotFound(f"{source} is damaged ({stored} has no finite numbers); download it again")
        weights = restored(weights, names[stored], stored, architecture, config)
        yield names[stored], weights.to(torch.bfloat16).contiguous()


def _expected(config: Any) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights of an empty model of this configuration."""
    # In the present default dtype: another one would be set for the whole process meanwhile.
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())
    return {name: tuple(each.shape) for name, each in model.state_dict().items()}


def _check_tensors(
    source: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], config: Any
) -> None:
    """Check names and shapes against those of an empty model of the same configuration. Raises ModelNotFound."""
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if expected.get(name) != shapes.get(name):
            differ = f"{shapes.get(name, 'none')} in place of {expected.get(name, 'none')}"
            raise ModelNotFound(f"{source}: {name} has shape {differ}; the file does not fit its own metadata")


def _set_special_tokens(tokenizer: Any, reader: GGUFReader) -> None:
    """Set BOS, EOS and others to what the file says; some versions of transformers take their own."""
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = _value(reader, f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(number)))


def _write_config(folder: Path, config: Any, reader: GGUFReader) -> None:
    """Write config.json and generation_config.json, without what changes from one transformers to the next."""
    fields = {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("_name_or_path", "_model_name_or_path", "transformers_version", "quantization_config")
    }
    ends = [_value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    generation = {"eos_token_id": sorted({int(each) for each in ends if each is not None})}
    for name, values in (("config.json", fields), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
