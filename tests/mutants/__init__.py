"""Mutants: patches that break one thing each, and a runner that shows which tests fail (`python -m tests.mutants`)."""
