"""`ragkv bench kernels`: our kernels compared with their rooflines.

The setting is a long question: the sizes of a model, a context of 16k tokens of which a seventh is kept, and decoding
of one request and of sixteen. Kernels are timed in a recorded graph, over more data than fits into the L2 cache, and
compared with the float32 reference on the same numbers. The bound of a kernel is the largest of

    memory      bytes read and written, at the speed of a long copy
    link        bytes read from page-locked host memory, at the speed of the copy engine
    arithmetic  of visible query-key pairs, at the speed of a large product
    launch      time of the smallest kernel in such a graph

`share` is the bound / the time taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.grid import TextGrid
from benchmarks.roofline import Speeds, speeds
from benchmarks.shapes import ModelShape
from ragkv.errors import InputError
from ragkv.kernels import decode_step as step_reference
from ragkv.kernels import rows as row_reference
from ragkv.kernels.attention import attend_planned, plan_mask
from ragkv.kernels.attention_reference import attend_lse
from ragkv.kernels.decode_step import CachePointers, splits_of
from ragkv.kernels.fp8_linear import linear_reference, quantise_rows
from ragkv.kernels.transfer import TransferFormat, TransferTable
from ragkv.store.format.layout import Layout
from ragkv.types import Shape

TURNS = 4
"""Sets of data that a kernel uses in turn."""
BLOCK = 16
"""Tokens of a transferred block."""


@dataclass(frozen=True)
class KernelParams:
    """Sizes.

    Attributes:
        keys: keys of the context.
        rows: rows that a repair pass recomputes.
        kept: keys that it attends to.
        blend: rows of a pass over the whole context.
        question: rows of the question.
        batches: numbers of requests that decode together.
    """

    keys: int = 16384
    rows: int = 2160
    kept: int = 2320
    blend: int = 2460
    question: int = 32
    batches: tuple[int, ...] = (1, 16)


@dataclass(frozen=True)
class KernelWork:
    """Work of a kernel: bytes of device memory, bytes over the link, arithmetic operations."""

    memory: float
    link: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class Case:
    """A kernel in one setting. runs: one per set of data. error: relative L2, to the reference; None: not measured."""

    kernel: str
    setting: str
    work: KernelWork
    runs: Sequence[Callable[[], object]]
    error: float | None = None


@dataclass(frozen=True)
class KernelRow:
    """One kernel in one setting. us, bound: microseconds. by: what bounds it."""

    kernel: str
    setting: str
    us: float
    bound: float
    by: str
    share: float
    error: float | None


def bound(work: KernelWork, at: Speeds, launch: float) -> tuple[float, str]:
    """(bound in microseconds, what bounds it). launch: microseconds."""
    times = {
        "memory": 1e6 * work.memory / at.copy,
        "link": 1e6 * work.link / at.link,
        "arithmetic": 1e6 * work.flops / at.products,
        "launch": launch,
    }
    by = max(times, key=lambda name: times[name])
    return times[by], by


@torch.inference_mode()
def measure(
    form: ModelShape, params: KernelParams, device: str, progress: Callable[[str, int, int], None]
) -> tuple[Speeds, list[KernelRow]]:
    """Measure on a GPU, in bfloat16. Raises InputError on another device."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        raise InputError("kernels are measured on a GPU: give --device cuda where there is one")
    from ragkv.kernels import triton_decode_step, triton_fp8_linear, triton_rows, triton_transfer

    torch.manual_seed(0)
    bench = _Bench(form, device)
    at, launch = speeds(torch.device(device), torch.bfloat16), _us([bench.smallest(triton_decode_step)])
    cases = [
        *(bench.steps(triton_decode_step, params, count) for count in params.batches),
        bench.rows(triton_rows, params.rows),
        bench.attention("repair", params.rows, params.kept),
        bench.attention("a share of the whole context", params.blend, params.keys),
        bench.attention("question", params.question, params.kept),
        bench.transfer(triton_transfer, params.kept),
        *(bench.fp8(triton_fp8_linear, count) for count in (*params.batches, params.question)),
    ]
    found = []
    for number, made in enumerate(cases):
        for case in made:
            taken, (least, by) = _us(case.runs), bound(case.work, at, launch)
            found.append(KernelRow(case.kernel, case.setting, taken, least, by, least / taken, case.error))
        torch.cuda.empty_cache()
        progress("kernels", number + 1, len(cases))
    return at, found


def _us(runs: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one run; all runs are recorded in one graph."""
    from triton.testing import do_bench_cudagraph

    taken: float = do_bench_cudagraph(lambda: [run() for run in runs])
    return 1000 * taken / len(runs)


class _Bench:
    """Data of one shape, and the kernels over them."""

    def __init__(self, form: ModelShape, device: str):
        self.form, self.device = form, device
        self.shape = Shape(TURNS, form.q_heads, form.kv_heads, form.head_dim)

    def draw(self, *size: int) -> Tensor:
        """Random numbers, bfloat16."""
        return torch.randn(*size, dtype=torch.bfloat16, device=self.device)

    def turns(self, count: int) -> Tensor:
        """What stands for cosines and sines of so many positions: the halves are alike, as a model's are."""
        return self.draw(count, self.form.head_dim // 2).repeat(1, 2)

    def smallest(self, kernels: ModuleType) -> Callable[[], object]:
        """A kernel with the least possible work."""
        tiny = self.draw(1, 32)
        return lambda: kernels.gated(tiny)

    def steps(self, kernels: ModuleType, params: KernelParams, count: int) -> Iterator[Case]:
        """Kernels of a decode step of `count` requests, without its products."""
        form, shape, setting = self.form, self.shape, f"{count} decoding at {params.keys}"
        yield from self.between(kernels, count, setting)
        k, v = (
            [[self.draw(params.keys + 1, form.kv_heads, form.head_dim) for _ in range(count)] for _ in range(TURNS)]
            for _ in (0, 1)
        )
        where = [[[each.data_ptr() for each in layer] for layer in store] for store in (k, v)]
        held = [[params.keys] * count] * TURNS
        places = CachePointers(torch.tensor([*where, held], device=self.device), k, v)
        qkv, at = self.draw(count, (form.q_heads + 2 * form.kv_heads) * form.head_dim), self.turns(count)
        moved = 4 * qkv.numel() + 4 * at.numel()
        runs = [partial(kernels.rope_append, qkv, at, at, places, i, shape, None) for i in range(TURNS)]
        expected = step_reference.rope_append(qkv.float(), at.float(), at.float(), _wide(places), 0, shape, None)
        yield Case("turn", setting, KernelWork(moved), runs, _far(runs[0](), expected))
        q, splits = self.draw(count, form.q_heads, form.head_dim), splits_of(count, form.kv_heads, params.keys + 1)
        scale = form.head_dim**-0.5
        runs = [partial(kernels.attend, q, places, i, shape, scale=scale, splits=splits) for i in range(TURNS)]
        expected = step_reference.attend(q.float(), _wide(places), 0, shape, scale=scale, splits=1)
        pairs = count * (params.keys + 1)
        yield Case("attend", setting, self.attending(count, pairs, pairs), runs, _far(runs[0](), expected))

    def between(self, kernels: ModuleType, count: int, setting: str) -> Iterator[Case]:
        """`add_norm` and `gated` of so many rows."""
        hidden, wide = self.form.hidden, self.form.intermediate
        turns = max(1, min(TURNS, 2**26 // (count * wide)))
        x, y = ([self.draw(count, hidden) for _ in range(turns)] for _ in (0, 1))
        weight = self.draw(hidden)
        runs = [partial(kernels.add_norm, a, b, weight, 1e-5) for a, b in zip(x, y, strict=True)]
        expected = step_reference.add_norm(x[0].float(), y[0].float(), weight.float(), 1e-5)[1]
        error = _far(kernels.add_norm(x[0], y[0], weight, 1e-5)[1], expected)
        yield Case("add_norm", setting, KernelWork(8.0 * count * hidden), runs, error)
        gates = [self.draw(count, 2 * wide) for _ in range(turns)]
        runs = [partial(kernels.gated, gate) for gate in gates]
        expected = step_reference.gated(gates[0].float())
        yield Case("gated", setting, KernelWork(6.0 * count * wide), runs, _far(kernels.gated(gates[0]), expected))

    def rows(self, kernels: ModuleType, count: int) -> Iterator[Case]:
        """Kernels of a pass, without products and attention."""
        form, setting = self.form, f"{count} rows"
        yield from self.between(kernels, count, setting)
        all_heads = form.q_heads + 2 * form.kv_heads
        qkv = [self.draw(count, all_heads * form.head_dim) for _ in range(TURNS)]
        at, slots = self.turns(count), torch.randperm(count, device=self.device).int()
        k, v = (self.draw(count, form.kv_heads, form.head_dim) for _ in (0, 1))
        runs = [partial(kernels.rope_scatter, x, at, at, slots, k, v, self.shape, None) for x in qkv]
        wide = at.float()
        expected = row_reference.rope_scatter(qkv[0].float(), wide, wide, slots, k.float(), v.float(), self.shape, None)
        yield Case(
            "place", setting, KernelWork(4.0 * qkv[0].numel() + 4.0 * at.numel()), runs, _far(runs[0](), expected)
        )

    def attention(self, name: str, count: int, keys: int) -> Iterator[Case]:
        """Attention by positions of `count` of `keys` rows: the last ones for a question, else random ones."""
        form, scale = self.form, self.form.head_dim**-0.5
        k_at = torch.arange(keys)
        q_at = k_at[-count:] if name == "question" else torch.randperm(keys)[:count].sort().values
        seen = plan_mask(q_at, k_at, torch.device(self.device), form.q_heads // form.kv_heads)
        pairs = int((q_at + 1).sum())
        q = self.draw(count, form.q_heads, form.head_dim)
        k, v = ([self.draw(keys, form.kv_heads, form.head_dim) for _ in range(TURNS)] for _ in (0, 1))
        runs = [partial(attend_planned, q, a, b, seen, scale=scale) for a, b in zip(k, v, strict=True)]
        some = slice(-64, None)
        expected = attend_lse(q[some].float(), k[0].float(), v[0].float(), q_at[some], k_at, scale=scale)[0]
        error = _far(runs[0]()[some], expected)
        work = self.attending(count, keys, pairs)
        yield Case("attend_lists", f"{name}: {count} rows, {keys} keys", work, runs, error)

    def attending(self, rows: int, keys: int, pairs: int) -> KernelWork:
        """Attention of so many rows; keys are read once."""
        form = self.form
        moved = 4 * keys * form.kv_heads * form.head_dim + 4 * rows * form.q_heads * form.head_dim
        return KernelWork(moved, flops=4.0 * pairs * form.q_heads * form.head_dim)

    def transfer(self, kernels: ModuleType, tokens: int) -> Iterator[Case]:
        """Transfer of blocks of `tokens` tokens in `TURNS` layers, from host and device memory, in random order."""
        form, count = self.form, tokens // BLOCK
        one = Shape(1, form.q_heads, form.kv_heads, form.head_dim)
        k, v = (self.draw(count * BLOCK, form.kv_heads, form.head_dim) for _ in (0, 1))
        at, first = self.turns(count * BLOCK), torch.arange(count) * BLOCK
        row = form.kv_heads * form.head_dim * 2
        for body in ("exact", "int8"):
            size = Layout(one, BLOCK, BLOCK, torch.bfloat16, body).full_bytes
            host = torch.zeros(TURNS, count, size, dtype=torch.uint8, pin_memory=True)
            for place, pool in (("host", host), ("gpu", host.to(self.device))):
                tables = [
                    torch.stack(
                        [
                            layer.data_ptr() + torch.randperm(count) * size,
                            torch.full((count,), BLOCK),
                            *(store.data_ptr() + first * row for store in (k, v)),
                            first,
                        ]
                    ).to(self.device)
                    for layer in pool
                ]
                kind = TransferFormat(body, BLOCK, form.kv_heads, form.head_dim, torch.bfloat16, near=place == "gpu")
                runs = [
                    partial(kernels.transfer_blocks, TransferTable(table), 0, count, at, at, kind) for table in tables
                ]
                written = 2.0 * count * BLOCK * row
                read = float(count * size)
                work = KernelWork(written, link=read) if place == "host" else KernelWork(written + read)
                yield Case("carry", f"{count} blocks, {body}, from {place}", work, runs)

    def fp8(self, kernels: ModuleType, count: int) -> Iterator[Case]:
        """The gate and up projection in FP8 of so many rows, and rounding these rows to FP8."""
        form, setting = self.form, f"{count} rows"
        x = self.draw(count, form.hidden)
        weights = [quantise_rows(self.draw(2 * form.intermediate, form.hidden)) for _ in range(TURNS)]
        runs = [partial(kernels.linear, x, codes, scale, None) for codes, scale in weights]
        expected = linear_reference(x.float(), *weights[0], None)
        work = KernelWork(float(weights[0][0].numel()), flops=2.0 * count * weights[0][0].numel())
        yield Case("fp8_linear", setting, work, runs, _far(runs[0](), expected))
        work = KernelWork(3.0 * x.numel())
        yield Case("quantise_rows", setting, work, [partial(kernels.quantise_rows, x)])


def _wide(pointers: CachePointers) -> CachePointers:
    """The rows of the first layer as float32, for the reference."""
    k, v = ([[each.float() for each in store[0]]] for store in (pointers.k, pointers.v))
    return CachePointers(pointers.table[:, :1], k, v)


def _far(found: object, expected: Tensor) -> float:
    assert isinstance(found, Tensor)
    return float((found.float() - expected).norm() / expected.norm())


def grid(rows: Sequence[KernelRow]) -> TextGrid:
    """Microseconds, and the share of the bound."""
    heads = ("kernel", "setting", "bound by", "µs", "bound", "share", "error")
    cells = [
        (
            row.kernel,
            row.setting,
            row.by,
            f"{row.us:.1f}",
            f"{row.bound:.1f}",
            f"{row.share:.0%}",
            "–" if row.error is None else f"{row.error:.1e}",
        )
        for row in rows
    ]
    return TextGrid(heads, tuple(cells), words=3)
