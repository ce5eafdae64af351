"""Compile kernels for a GPU that need not be present, and print their PTX and the assembler log as JSON.

This runs in its own process, because Triton cannot compile kernels in a process that interprets them.
"""

from __future__ import annotations

import contextlib
import io
import json

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ragkv.kernels import (
    triton_block_sparse,
    triton_block_sparse_tma,
    triton_fp8_linear,
    triton_lines,
    triton_pool,
    triton_rows,
    triton_transfer,
)
from ragkv.kernels import triton_decode_step as kernels
from ragkv.kernels import triton_paged_attention as paged

HOPPER = GPUTarget("cuda", 90, 32)
HEADS = {"Q_HEADS": 32, "KV_HEADS": 8, "D": 128}
"""Heads of Llama-3.1-8B."""
UNITS = {
    **HEADS,
    "NORMED": False,
    "WIDE": 128,
    "HALF_WIDE": 64,
    "LANES": 16,
    "UNIT": 68,
    "FIELDS": 4,
    "ROWS": 64,
    "BLOCK": 16,
    "KEYS": paged.KEYS,
    "SEGMENT": 32,
    "BODY": 0,
    "PRECISE": False,
}
TILES = {"TILE": 32, "BLOCK": 64, "ROWS": 32, "FOLD": 4, "D": 128, "WAIT": True}
CASES = {
    "add_norm": (kernels._add_norm, {"SIZE": 4096, "WIDE": 4096}, {"num_warps": 8}),
    "gated": (kernels._gated, {"SIZE": 14336, "PIECE": 1024}, {}),
    "rope_append": (kernels._rope_append, {**HEADS, "NORMED": False, "WIDE": 64}, {"num_warps": 1}),
    "rope_append_normed": (kernels._rope_append, {**HEADS, "NORMED": True, "WIDE": 64}, {"num_warps": 1}),
    "attend": (
        kernels._attend,
        {**HEADS, "WIDE": 128, "KEYS": kernels.KEYS, "ROWS": 16, "PRECISE": False},
        {"num_warps": 4, "num_stages": 3},
    ),
    "rope_scatter": (triton_rows._rope_scatter, {**HEADS, "NORMED": False, "WIDE": 64, "HEADS": 8}, {"num_warps": 2}),
    "tiles": (triton_block_sparse_tma._attend, TILES, {"num_warps": 8, "num_stages": 2, "maxnreg": 128}),
    "fp8_linear": (
        triton_fp8_linear._linear,
        {"BIAS": False, "TILE": 8, "DEPTH": 1024, "STAGES": 4},
        {"num_warps": 4, "num_stages": 4},
    ),
    "fp8_linear_rounded": (
        triton_fp8_linear._linear_rounded,
        {"BIAS": False, "WHOLE": True, "ROWS": 16, "TILE": triton_fp8_linear.TILE, "DEPTH": triton_fp8_linear.DEPTH},
        {"num_warps": 4, "num_stages": 4},
    ),
    "quantise_rows": (triton_fp8_linear._quantise_rows, {"SIZE": 14336, "WIDE": 16384}, {"num_warps": 8}),
    "merge": (kernels._merge, {"Q_HEADS": 32, "D": 128, "WIDE": 128, "SPLITS": 32}, {"num_warps": 4}),
    "attend_units": (paged._attend_units, UNITS, {"num_warps": 4, "num_stages": 2}),
    # Fewer rows than keys at a time, too: a name that the loop gives to a tensor of another shape does not compile.
    "attend_units_other": (
        paged._attend_units,
        {**UNITS, "NORMED": True, "ROWS": 16, "LANES": 4, "BODY": triton_transfer.BODIES["fp8"]},
        {"num_warps": 4, "num_stages": 2},
    ),
    "merge_all": (
        paged._merge_all,
        {"Q_HEADS": 32, "D": 128, "WIDE": 128, "SPLITS": 32, "PARTS": paged.PARTS},
        {"num_warps": 4},
    ),
    "progress": (
        triton_pool._attend_progressively,
        {
            **HEADS,
            "WIDE": 128,
            "SIZE": 32,
            "MICRO": 4,
            "PADDED": 4,
            "ROWS": 16,
            "STEP": triton_pool.NEAR,
            "MEAN": False,
            "PRECISE": False,
        },
        {"num_warps": 8, "num_stages": 2},
    ),
    "load_ahead": (
        triton_pool._load_ahead,
        {"KV_HEADS": 8, "D": 128, "WIDE": 128, "SIZE": 16},
        {"num_warps": 4},
    ),
    **{
        f"transfer_{body}": (
            triton_transfer._transfer,
            {
                "BODY": number,
                "ALIGN": 16,
                "PIECES": 2,
                "TOKENS": 8,
                "HEADS": 8,
                "HEADS_WIDE": 8,
                "D": 128,
                "WIDE": 64,
            },
            {"num_warps": 8},
        )
        for body, number in triton_transfer.BODIES.items()
    },
}
FLOATS = dict.fromkeys(("eps", "scale", "threshold", "part", "limit"), "fp32")
STRIDES = {f"{name}_{step}" for name in "qkv" for step in ("row", "head")} | {"size"}
MODEL = {"share", "group", "outputs"}
NUMBERS = {"layer", "layers", "width", "most", "least", "first", "items", "entries", "count", "keys", "tiles", "offset"}
NUMBERS |= STRIDES | MODEL | {"slots", "listed", "rows"}
ADDRESSES = ("table", "order", "host", "clock", "ranked", "first", "block_of", "last_used", "free")
ADDRESSES += ("positions", "units", "bounds")
WIDE = dict.fromkeys((f"{name}_ptr" for name in ADDRESSES), "*i64")
COUNTED = (
    "slots",
    "slot_of",
    "taken",
    "loaded",
    "read",
    "missed",
    "q_at",
    "k_at",
    "blocks",
    "counts",
    "clear",
)
COUNTS = dict.fromkeys((f"{name}_ptr" for name in COUNTED), "*i32")
PARTIAL = dict.fromkeys(("parts_ptr", "lses_ptr", "own_ptr", "own_lses_ptr", "lse_ptr", "threshold_ptr"), "*fp32")
FP8 = {"codes_ptr": "*i8", "coded_ptr": "*i8", "scales_ptr": "*fp32", "factors_ptr": "*fp32"}
TENSOR_CORES = {"codes_ptr": "*fp8e4nv", "weight_ptr": "*fp8e4nv"}
"""Of the product of several rows, which multiplies bytes as they are."""
COPIED = dict.fromkeys(("k_rows", "v_rows"), f"tensordesc<bf16[{triton_block_sparse_tma.KEYS},128]>")


def type_of(name: str, constants: dict[str, object]) -> str:
    """Return the Triton type of an argument."""
    if name in constants:
        return "constexpr"
    return "i32" if name in NUMBERS else {**FLOATS, **WIDE, **COUNTS, **PARTIAL, **COPIED, **FP8}.get(name, "*bf16")


def compile_kernel(kernel: object, constants: dict[str, object], options: dict[str, int]) -> dict[str, str]:
    """Compile as for a launch with tensors and strides aligned to 16 bytes, after which no kernel starts early."""
    constants = {"EARLY": False, **constants} if "EARLY" in kernel.arg_names else constants
    signature = {name: type_of(name, constants) for name in kernel.arg_names}
    signature |= TENSOR_CORES if kernel is triton_fp8_linear._linear_rounded else {}
    aligned = [i for i, (name, each) in enumerate(signature.items()) if each[0] == "*" or name in STRIDES]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    with contextlib.redirect_stdout(io.StringIO()) as log:
        text = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
    return {"ptx": str(text), "log": log.getvalue()}


def specialised_arguments(kernel: object) -> list[str]:
    """List integer arguments for which Triton would compile another kernel, except those that the model fixes."""
    fixed = {*FLOATS, *COPIED, *STRIDES, *MODEL}
    numbers = [each for each in kernel.params if not each.is_constexpr and not each.name.endswith("_ptr")]
    return [each.name for each in numbers if each.name not in fixed and not each.do_not_specialize]


if __name__ == "__main__":
    knobs.nvidia.dump_ptxas_log = True
    launched = {case[0] for case in CASES.values()} | {
        triton_block_sparse._attend,
        triton_block_sparse._merge,
        triton_lines._cover,
    }
    names = {f"{kernel.__module__}.{kernel.__name__}": specialised_arguments(kernel) for kernel in launched}
    print(json.dumps({"compiled": {name: compile_kernel(*case) for name, case in CASES.items()}, "specialised": names}))
