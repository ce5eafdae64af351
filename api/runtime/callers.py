"""Who sends a request, and what the role allows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import inf
from typing import Literal, get_args

from ragkv.api.runtime.tenants import Tenant
from ragkv.errors import Forbidden, RagkvError

Role = Literal["reader", "writer"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Caller:
    """Who sends a request.

    Attributes:
        tenant: Whose documents they see.
        subject: Their name in the audit log; empty where the service is open to all.
        role: A reader searches, asks and reads documents. A writer also adds and deletes them.
        expires: When what they showed expires, in Unix seconds.
    """

    tenant: Tenant = field(default_factory=Tenant)
    subject: str = ""
    role: Role = "writer"
    expires: float = inf

    @property
    def writes(self) -> bool:
        """Whether the role allows to change documents."""
        return self.role == "writer"

    @property
    def expired(self) -> bool:
        """Whether what they showed has expired."""
        return time.time() >= self.expires

    def require_writer(self) -> None:
        """Raise Forbidden unless the caller may change documents."""
        if not self.writes or self.expired:
            raise Forbidden("this needs the role writer; you have the role reader, which only reads and asks")


class IssuerAway(RagkvError):
    """The issuer of tokens cannot be reached, and none of its keys are known."""

    def __init__(self) -> None:
        super().__init__("tokens cannot be verified at the moment; try again in 10 s")
