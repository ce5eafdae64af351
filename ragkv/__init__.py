"""ragkv: a RAG service that reads every document once and reuses what the language model computed."""

import os

# Threads that wait for each other sleep instead of spinning: beside any other work a spinning thread keeps a processor
# from the thread that it waits for. OpenMP reads this once, when torch is imported, so every entry point, and every
# process that it starts, must have it before. A value that the user sets is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "1.0.0"
