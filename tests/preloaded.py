"""Imports what programs need, in the server that they are forked from (forked.py).

The garbage collector waits until that is done, and then leaves these objects alone: in every fork it would visit them
again, and by that copy the memory that holds them.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module

LIBRARIES = (
    *("ragkv.cli", "ragkv.cli.remote", "ragkv.engine.engine", "ragkv.ingest.pipeline", "ragkv.api.app"),
    *("sentence_transformers", "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"),
)
"""What most programs import, and what they import late."""

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a team of threads does not survive a fork
gc.disable()
for name in LIBRARIES:
    import_module(name)
made_once = import_module("tests.made_once")
sharing = made_once.sharing()
sharing.__enter__()  # never left: the programs share it, too
made_once.make_all()
gc.freeze()
gc.enable()
