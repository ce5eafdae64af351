"""Ingest: bytes to text, text to chunks, chunks to vectors and KV, and all of it into the catalogue."""

import ragkv  # noqa: F401 - sets what OpenMP reads when torch is imported
