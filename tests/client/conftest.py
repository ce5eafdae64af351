"""A running service for the client's tests: that of the API's."""

from __future__ import annotations

from tests.api.conftest import service

__all__ = ["service"]
