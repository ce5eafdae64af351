"""Passages of real English prose, made from the documentation packages of Debian."""
