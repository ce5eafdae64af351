"""Tenants: whose collections a request may name.

Inside, a tenant's collection is `tenant:collection`, so that catalogue, index, KV keys and conversations are apart
without knowing of tenants. Without tenants a collection is called as it is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tenant:
    """name: of letters, digits and hyphens; empty: the service knows no tenants."""

    name: str = ""

    def inside(self, collection: str) -> str:
        """What a collection of the tenant is called in the catalogue."""
        return f"{self.name}:{collection}" if self.name else collection

    def outside(self, collection: str) -> str:
        """What the tenant calls it."""
        return collection.removeprefix(f"{self.name}:") if self.name else collection

    def told(self, message: str) -> str:
        """What a message says to the tenant: it knows its collections by its own names only."""
        return message.replace(f"'{self.name}:", "'") if self.name else message

    def owns(self, collection: str) -> bool:
        """Whether a collection of the catalogue is the tenant's."""
        return not self.name or collection.startswith(f"{self.name}:")
