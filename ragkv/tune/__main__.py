"""`python -m ragkv.tune`, for processes that torchrun starts: the training alone, from passages in a file."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

