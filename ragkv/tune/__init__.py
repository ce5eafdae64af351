"""Tuning: adapters that let a model read chunks that were encoded alone."""
