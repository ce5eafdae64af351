"""Sparse attention over long inputs: one paper a file, see base.py for what they share."""
