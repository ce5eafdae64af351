"""`ragkv bench`: measurements. They are in the repository, beside the package, which does not have them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import typer

import ragkv
from ragkv.errors import ConfigError


def bench(context: typer.Context) -> int:
    """Measure on this machine, in a checkout: `ragkv bench --help` lists the benchmarks."""
    checkout = Path(ragkv.__file__).resolve().parent.parent
    if not (checkout / "benchmarks" / "commands").is_dir():
        raise ConfigError("benchmarks are not part of the package; in a checkout of ragkv run `make bench`")
    if str(checkout) not in sys.path[:1]:  # another package of this name must not answer
        sys.path.insert(0, str(checkout))
    return int(import_module("benchmarks.commands").run(context.args))
