"""Tenants: which collections a request may name.

Internally a tenant's collection is called `tenant:collection`. That keeps the catalogue, the index, KV keys and
conversations of tenants apart, and none of these has to know about tenants. Without tenants a collection keeps its
name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tenant:
    """A tenant.

    Attributes:
        name: Letters, digits and hyphens; empty where the service has no tenants.
    """

    name: str = ""

    def inside(self, collection: str) -> str:
        """Return the name that a collection of the tenant has in the catalogue."""
        return f"{self.name}:{collection}" if self.name else collection

    def outside(self, collection: str) -> str:
        """Return the name that the tenant knows a collection by."""
        return collection.removeprefix(f"{self.name}:") if self.name else collection

    def told(self, message: str) -> str:
        """Rewrite a message so that it names collections as the tenant knows them."""
        return message.replace(f"'{self.name}:", "'") if self.name else message

    def owns(self, collection: str) -> bool:
        """Whether a collection of the catalogue belongs to the tenant."""
        return not self.name or collection.startswith(f"{self.name}:")
