"""The HTTP service over the engine."""

import ragkv  # noqa: F401 - sets what OpenMP reads when torch is imported
