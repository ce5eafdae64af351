"""Which settings allow replicas."""

from __future__ import annotations

from ragkv.config import Settings
from ragkv.errors import ConfigError


def check_settings(settings: Settings) -> None:
    """Raise ConfigError if these settings do not allow replicas."""
    if settings.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"every replica has a GPU of its own; --device {settings.device} needs `ragkv serve` alone")
