"""Results of `ragkv bench ttft --shape` as tables."""

from __future__ import annotations

from benchmarks.asked import STEPS
from benchmarks.grid import TextGrid, number
from benchmarks.ttft_shape import ShapeResult, ShapeRow


def title(result: ShapeResult) -> str:
    """A title: what was measured, and on which machine."""
    p = result.params
    return (
        f"{result.model} ({result.layers} layers, {result.dtype}) on {result.device}, {result.threads} threads, "
        f"torch {result.torch}: {p.chunks} chunks of {p.chunk_tokens} tokens in tier {p.tier}, "
        f"questions of {p.question}, median of {p.repeat} after {p.warmup}"
    )


def times(result: ShapeResult) -> TextGrid:
    """Times in ms, shares in percent. KV: of the context cache / full's."""
    heads: tuple[str, ...] = ("method", "TTFT ms", "least", "most", "× full", "with ingest", "× full")
    heads += ("kept", "recomputed", "loaded", "KV", "bound ms", "of floor", "note")
    return TextGrid(heads, tuple(_times(row) for row in result.rows))


def steps(result: ShapeResult) -> TextGrid:
    """Milliseconds by step, from separate questions, and the least milliseconds of each kind of work."""
    heads = ("method", *STEPS, "weights", "KV", "link", "FLOPs", "loaded MiB", "KV MiB", "of it live")
    return TextGrid(heads, tuple(_steps(row) for row in result.rows))


def notes(result: ShapeResult) -> list[str]:
    """Notes: the setting that the figures were measured in."""
    backends = ", ".join(f"{name} {ms:.1f} ms" for name, ms in result.backends.items()) or "none ran"
    at, heads = result.speeds, len(result.retrieval_heads)
    found = [
        f"full by {result.backend or 'no kernel'}; {backends} (the first is torch's choice)",
        f"blocks of {result.block} tokens, {result.initial} initial and {result.local} local; {heads} retrieval "
        f"heads in layers {_span([layer for layer, _ in result.retrieval_heads])}, "
        f"stable layers {_span(result.stable_layers)}",
        f"measured here: copies {at.copy / 1e12:.2f} TB/s, link {at.link / 1e9:.1f} GB/s, "
        f"products {at.products / 1e12:.2f} TFLOP/s",
        f"ingest of all chunks: encoding {result.encode:.0f} ms, storing {result.store:.0f} ms",
    ]
    if result.gate is not None:
        full, sparse = result.gate.full, result.gate.sparse
        found.append(
            f"gate: full {full.fixed:.1f} ms + {1000 * full.each:.2f} µs a token + "
            f"{1e9 * full.square:.2f} ps a token squared; "
            f"stored KV {sparse.fixed:.1f} ms + {1000 * sparse.each:.2f} µs a row"
        )
    return found


def _times(row: ShapeRow) -> tuple[str, ...]:
    least, most = (min(row.times), max(row.times)) if row.times else (None, None)
    bound = None if row.floors is None else row.floors.bound
    return (
        row.method,
        number(row.ttft, ".1f"),
        number(least, ".1f"),
        number(most, ".1f"),
        number(row.speedup, ".2f"),
        number(row.with_ingest, ".0f"),
        number(row.speedup_with_ingest, ".2f"),
        number(row.sequence, ".1%"),
        number(row.recompute, ".1%"),
        number(row.load, ".1%"),
        number(row.kv_share, ".1%"),
        number(bound, ".1f"),
        number(row.of_floor, ".1%"),
        row.note,
    )


def _steps(row: ShapeRow) -> tuple[str, ...]:
    spans = [number(None if row.steps is None else row.steps[step], ".1f") for step in STEPS]
    f = row.floors
    parts = (None,) * 4 if f is None else (f.weights, f.kv, f.link, f.flops)
    live = None if row.kv is None or row.kv_live is None else row.kv_live / row.kv
    cells = (number(row.loaded, ".0f", 2**-20), number(row.kv, ".0f", 2**-20), number(live, ".0%"))
    return (row.method, *spans, *(number(part, ".2f") for part in parts), *cells)


def _span(layers: tuple[int, ...] | list[int]) -> str:
    return f"{min(layers)} to {max(layers)}" if layers else "none"
