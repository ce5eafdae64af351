"""Measurements through the real parts: time to first token, answers of every method."""
