"""Compiles kernels for a GPU that need not be there, and prints their PTX as JSON.

A process of its own: where Triton interprets kernels it cannot compile them.
"""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ragkv.kernels import triton_carry, triton_pool, triton_rows
from ragkv.kernels import triton_steps as kernels

HOPPER = GPUTarget("cuda", 90, 32)
HEADS = {"Q_HEADS": 32, "KV_HEADS": 8, "D": 128}
"""Those of Llama-3.1-8B."""
CASES = {
    "add_norm": (kernels._add_norm, {"SIZE": 4096, "WIDE": 4096}, {"num_warps": 8}),
    "gated": (kernels._gated, {"SIZE": 14336, "PIECE": 1024}, {}),
    "turn": (kernels._turn, {**HEADS, "NORMED": False, "WIDE": 64}, {"num_warps": 1}),
    "turn_normed": (kernels._turn, {**HEADS, "NORMED": True, "WIDE": 64}, {"num_warps": 1}),
    "attend": (
        kernels._attend,
        {**HEADS, "WIDE": 128, "KEYS": kernels.KEYS, "ROWS": 16, "PRECISE": False},
        {"num_warps": 4, "num_stages": 3},
    ),
    "place": (triton_rows._place, {**HEADS, "NORMED": False, "WIDE": 64, "HEADS": 8}, {"num_warps": 2}),
    "merge": (kernels._merge, {"Q_HEADS": 32, "D": 128, "WIDE": 128, "SPLITS": 32}, {"num_warps": 4}),
    "progress": (
        triton_pool._progress,
        {
            **HEADS,
            "WIDE": 128,
            "SIZE": 32,
            "MICRO": 4,
            "PADDED": 4,
            "ROWS": 16,
            "SLOTS": 256,
            "ROOM": 256,
            "STEP": triton_pool.NEAR,
            "MEAN": False,
            "PRECISE": False,
        },
        {"num_warps": 8, "num_stages": 2},
    ),
    **{
        f"carry_{body}": (
            triton_carry._carry,
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
        for body, number in triton_carry.BODIES.items()
    },
}
FLOATS = dict.fromkeys(("eps", "scale", "threshold", "part", "limit"), "fp32")
NUMBERS = {"layer", "layers", "width", "most", "least", "first", "items", "entries"}
WIDE = dict.fromkeys(("table_ptr", "order_ptr", "host_ptr", "clock_ptr"), "*i64")
COUNTED = ("slots", "ranked", "place", "owner", "used", "read", "missed")
COUNTS = dict.fromkeys((f"{name}_ptr" for name in COUNTED), "*i32")
PARTIAL = {"parts_ptr": "*fp32", "lses_ptr": "*fp32"}


def kind(name: str, constants: dict[str, object]) -> str:
    """What an argument is."""
    if name in constants:
        return "constexpr"
    return "i32" if name in NUMBERS else {**FLOATS, **WIDE, **COUNTS, **PARTIAL}.get(name, "*bf16")


def ptx(kernel: object, constants: dict[str, object], options: dict[str, int]) -> str:
    """As at a launch with tensors that begin at multiples of 16 bytes."""
    signature = {name: kind(name, constants) for name in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, each in enumerate(signature.values()) if each[0] == "*"}
    source = ASTSource(kernel, signature, constants, attributes)
    return str(triton.compile(source, target=HOPPER, options=options).asm["ptx"])


if __name__ == "__main__":
    print(json.dumps({name: ptx(*case) for name, case in CASES.items()}))
