"""Parsers of formats other than plain text, one module each. They run in a process of their own (ingest/sandbox.py).

That process imports this package once per document. The package therefore imports little, and each format imports only
its own libraries.
"""
