"""Attention by positions. Tensors only."""
