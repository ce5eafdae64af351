"""Who a credential belongs to: an API key, a token of the issuer, or a login ticket of the dashboard."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ragkv.api.dashboard.guard import LoginTickets
from ragkv.api.middleware.keys import Keys, read_keys
from ragkv.api.runtime.callers import Caller
from ragkv.config import ServingSettings, Settings, SignInSettings
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from ragkv.api.middleware.tokens import TokenVerifier  # needs `ragkv[sso]`


class Authenticator:
    """Knows the callers. Without keys and without an issuer, everybody may use the service.

    Attributes:
        keys: The API keys.
        tokens: Verifies tokens; None without an issuer.
        tenants: Tenants that may use the service.
        tickets: Issues and verifies login tickets.
    """

    def __init__(self, keys: Keys, tokens: TokenVerifier | None = None):
        self.keys, self.tokens = keys, tokens
        self.tenants = keys.tenants | (tokens.tenants if tokens is not None else frozenset())
        # Without keys there is nothing that all replicas know, and tickets end with the process.
        self.tickets = LoginTickets(keys.secret if keys else secrets.token_bytes(32), self.tenants)

    def __bool__(self) -> bool:
        return bool(self.keys) or self.tokens is not None

    def takes_token(self, credential: str) -> bool:
        """Return whether a credential is looked at as a token."""
        return self.tokens is not None and credential.count(".") == 2

    async def caller_of(self, credential: str) -> Caller | None:
        """Return who sends a key or a token; None if it is not valid. Raises IssuerAway."""
        found = self.keys.caller_of(credential)
        if found is None and self.tokens is not None and self.takes_token(credential):
            found = await self.tokens.caller_of(credential)
        return found


def open_authenticator(settings: Settings) -> Authenticator:
    """Make the authenticator of a service. It asks the issuer when the first token comes.

    Raises:
        ConfigError: A setting is invalid, or a package is missing.
    """
    keys = read_keys(settings.part(ServingSettings).api_keys.get_secret_value())
    sign_in = settings.part(SignInSettings)
    if not sign_in.oidc_issuer:
        return Authenticator(keys)
    try:
        from ragkv.api.middleware.issuer import IssuerKeys
        from ragkv.api.middleware.tokens import TokenVerifier, read_rules
    except ImportError as error:
        raise ConfigError(
            f"RAGKV_OIDC_ISSUER needs {error.name}, which is not installed: pip install 'joserfc>=1.8,<2', which "
            "is the extra ragkv[sso], or leave it unset"
        ) from None
    address, _, key_address = sign_in.issuer
    return Authenticator(keys, TokenVerifier(read_rules(sign_in, keys), IssuerKeys(address, key_address)))
