"""Which objects the reference of the Python code shows. mkdocstrings fills in their docstrings and signatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

CLIENT = {
    "Clients": ("ragkv.client.Client", "ragkv.client.AsyncClient"),
    "Answers": ("ragkv.report.Answer", "ragkv.report.Citation", "ragkv.report.Report", "ragkv.passages.SearchResult"),
    "What the methods return": ("ragkv.client.models", "ragkv.client.document_models", "ragkv.client.job_models"),
}
"""Headings and dotted names of the page of the client: the stable part of the Python code."""

ENGINE = {
    "Settings": ("ragkv.config.Settings", "ragkv.config.load_settings"),
    "Engine": ("ragkv.engine.engine.Engine",),
    "Questions and documents": ("ragkv.types",),
    "Ingest": ("ragkv.ingest.loader.load", "ragkv.ingest.pipeline.ingest"),
    "What was read": ("ragkv.engine.kv_map.KVMap", "ragkv.engine.kv_map.ChunkKVMap"),
    "Store": ("ragkv.store.base.KVStore",),
    "Methods": ("ragkv.recompute.base",),
    "Errors": ("ragkv.errors",),
}
"""The same for the engine, which may change in any version."""

_NOTES = {
    "The Python client": "These names are stable: see [versions](../compatibility.md). "
    "[The HTTP API](../api.md#from-python) has examples.",
    "The engine": "`ragkv serve` and the commands are built of these. They are no stable interface: see "
    "[versions](../compatibility.md). The [quickstart notebook](../notebooks/quickstart.md) uses them.",
}


def python_page(title: str, sections: Mapping[str, Sequence[str]]) -> str:
    """Return a page with a section for each heading.

    Args:
        title: Title of the page.
        sections: Dotted names by heading.
    """
    parts = [f"# {title}", _NOTES[title]]
    for heading, names in sections.items():
        parts += [f"## {heading}", *(f"::: {name}\n    options:\n      heading_level: 3" for name in names)]
    return "\n\n".join(parts) + "\n"
