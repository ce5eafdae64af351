"""The running service of the API tests, for the client."""

from __future__ import annotations

from tests.api.conftest import service

__all__ = ["service"]
