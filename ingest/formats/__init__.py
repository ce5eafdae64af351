"""Files that are no plain text, to title and text: a module a format, in a process of its own (ingest/sandbox.py).

What is imported here is imported once a document: it stays light, and each format's libraries are its own.
"""
