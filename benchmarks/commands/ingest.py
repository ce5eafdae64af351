"""`ragkv bench ingest`: documents per second, beside the model's batched prefill.

With --shape it needs neither settings nor a catalogue: torch, transformers, xxhash, typer and rich are enough.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands.common import random_weights
from ragkv.cli.common import Device, Json, Model, Store, out, progress, settings_from, tell, write_json

if TYPE_CHECKING:
    from benchmarks.encode import EncodeResult


def ingest(
    file: Json = None,
    documents: Annotated[int, typer.Option("--documents", min=5, help="Documents, one chunk each.")] = 200,
    tokens: Annotated[int, typer.Option("--tokens", min=32, help="Tokens of a document.")] = 200,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Rounds; the median counts.")] = 5,
    shape: Annotated[
        str | None,
        typer.Option("--shape", help="Encode chunks with random weights of this shape; no documents, no store."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="With --shape: layers, if not the shape's.")
    ] = None,
    store: Store = None,
    model: Model = None,
    device: Device = None,
) -> int:
    """Ingest of many small documents: documents/s, share of the batched prefill, encoding over prefill."""
    if shape is not None:
        if model or store:
            raise typer.BadParameter("random weights have no model folder and no store", param_hint="--shape")
        from benchmarks.encode import EncodeParams, encode_shape

        with progress() as report:
            params = EncodeParams(tokens, repeat=repeat)
            encoded = encode_shape(random_weights(shape, device, layers, plain=False), params, report)
        write_json(file, dataclasses.asdict(encoded))
        _show_encoding(encoded)
        return 0
    if layers:
        raise typer.BadParameter("--layers is of random weights", param_hint="--shape")
    settings = settings_from(None, store, model, device)
    from benchmarks.ingest import IngestParams
    from benchmarks.ingest import ingest as measure

    with progress() as report:
        result = measure(settings, IngestParams(documents, tokens, min(repeat, documents)), report, tell)
    write_json(file, dataclasses.asdict(result))
    _show_encoding(result.encode)
    out().print(
        f"ingest, store {result.store}: {result.documents} documents of {result.tokens:.0f} tokens, "
        f"{result.documents_per_second:.1f} documents/s, {result.tokens_per_second:.0f} tokens/s, "
        f"{result.share:.0%} of their batched prefill ({result.prefill_tokens_per_second:.0f} tokens/s)"
    )
    return 0


def _show_encoding(result: EncodeResult) -> None:
    console = out()
    console.print(f"{result.model} on {result.device} ({result.dtype}), {result.threads} threads")
    console.print(
        f"one chunk of {result.tokens} tokens: prefill {result.prefill:.1f} ms, encode {result.encode:.1f} ms, "
        f"{result.over_prefill:.2f} times the prefill"
    )
    console.print(
        f"{result.chunks} chunks together: batched prefill {result.batched:.0f} tokens/s, encode {result.encoded:.0f} "
        f"({result.encoded_share:.0%}), encode and pack {result.packed:.0f} ({result.packed_share:.0%})"
    )
