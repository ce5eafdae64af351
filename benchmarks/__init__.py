"""Measurements through the real parts: `ragkv bench` in a checkout. The package does not have them."""
