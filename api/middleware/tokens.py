"""Tokens of an OpenID Connect issuer: who sends a request, and what they may do.

A token is a JWT that the issuer has signed with an asymmetric algorithm. Every claim that is looked at has to be there:
`iss`, `aud`, `exp`, `sub`, the tenant and the role. Whatever is wrong with a token, its sender learns only that it is
not valid.
"""

from __future__ import annotations

import base64
import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from joserfc import jwt
from joserfc.errors import JoseError, SecurityWarning
from joserfc.jws import JWSRegistry

from ragkv.api.middleware.claims import check_claims
from ragkv.api.middleware.issuer import IssuerKeys
from ragkv.api.middleware.keys import Keys, is_tenant_name
from ragkv.api.runtime.callers import ROLES, Caller, Role
from ragkv.api.runtime.tenants import Tenant
from ragkv.config import SignInSettings
from ragkv.errors import ConfigError

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
"""Algorithms whose verification needs no secret. `none` and HMAC are not among them."""
LEEWAY = 60
"""Seconds by which the clocks of issuer and service may differ."""
_MOST_CHARACTERS = 16 * 1024

logger = logging.getLogger("ragkv.api")


@dataclass(frozen=True)
class TokenRules:
    """What a token has to say.

    Attributes:
        issuer: Its `iss`.
        audience: What its `aud` names.
        tenant_claim: Claim that names the tenant.
        tenants: Tenants by the value of that claim.
        role_claim: Claim with the roles.
        roles: Roles by the values of that claim.
    """

    issuer: str
    audience: str
    tenant_claim: str
    tenants: Mapping[str, str]
    role_claim: str
    roles: Mapping[str, Role]


def read_rules(settings: SignInSettings, keys: Keys) -> TokenRules:
    """Read the rules from the settings.

    Args:
        settings: The settings.
        keys: The API keys. Their tenants may be named by tokens where `oidc_tenants` names none.

    Raises:
        ConfigError: A setting is missing or invalid.
    """
    issuer, audience, _ = settings.issuer
    if not audience:
        raise ConfigError(
            "RAGKV_OIDC_ISSUER: name the audience behind the issuer, else any token of the issuer would do"
        )
    tenant_claim, named = _read_claim("RAGKV_OIDC_TENANTS", settings.oidc_tenants, "tenant")
    tenants = dict(map(_tenant, named)) or {name: name for name in keys.tenants}
    if not tenants:
        raise ConfigError("RAGKV_OIDC_TENANTS: name the tenants of the tokens, or nobody could use the service")
    role_claim, named = _read_claim("RAGKV_OIDC_ROLES", settings.oidc_roles, "roles")
    pairs = set(map(_role, named))
    if not pairs or len(dict(pairs)) < len(pairs):
        raise ConfigError("RAGKV_OIDC_ROLES: name a value of the claim for a role, and no value for both roles")
    return TokenRules(issuer, audience, tenant_claim, tenants, role_claim, dict(pairs))


class TokenVerifier:
    """Verifies tokens.

    Attributes:
        tenants: Tenants that a token may name.
    """

    def __init__(self, rules: TokenRules, keys: IssuerKeys):
        self.tenants = frozenset(rules.tenants.values())
        self._rules, self._keys = rules, keys
        # Issuers put further parameters into the header, which RFC 7515 tells us to ignore unless `crit` names them.
        self._registry = JWSRegistry(algorithms=list(ALGORITHMS), strict_check_header=False)
        self._claims = jwt.JWTClaimsRegistry(
            leeway=LEEWAY,
            iss={"essential": True, "value": rules.issuer},
            aud={"essential": True, "value": rules.audience},
            exp={"essential": True},
            sub={"essential": True},
        )

    async def caller_of(self, token: str) -> Caller | None:
        """Return who sends a token; None if it is not valid.

        Raises:
            IssuerAway: The issuer cannot be reached, and its keys are not known.
        """
        try:
            if len(token) > _MOST_CHARACTERS:
                return None
            key = await self._keys.find(_key_id(token))
            if key is None:
                return None
            with warnings.catch_warnings():
                # Issuers with Ed25519 keys still name the algorithm EdDSA, which RFC 9864 renames.
                warnings.simplefilter("ignore", SecurityWarning)
                claims = jwt.decode(token, key, registry=self._registry).claims
            check_claims(claims)
            self._claims.validate(claims)
        except (JoseError, ValueError, TypeError, OverflowError, RecursionError) as error:
            logger.debug("a token was refused: %s", type(error).__name__)
            return None
        return self._read(claims)

    def _read(self, claims: Mapping[str, Any]) -> Caller | None:
        """Return the caller that verified claims name; None if they name no tenant or no role."""
        tenant = _claim(claims, self._rules.tenant_claim)
        known = self._rules.tenants.get(tenant) if isinstance(tenant, str) else None
        named = _claim(claims, self._rules.role_claim)
        words = named.split() if isinstance(named, str) else named if isinstance(named, list) else []
        roles = {self._rules.roles[word] for word in words if isinstance(word, str) and word in self._rules.roles}
        subject = claims["sub"]
        if known is None or not roles:
            return None
        role: Role = "writer" if "writer" in roles else "reader"
        return Caller(Tenant(known), subject, role, float(claims["exp"]) + LEEWAY)


def _key_id(token: str) -> str | None:
    """Return the id of the key that a token names; None if it names none. Raises ValueError."""
    encoded = token.partition(".")[0]
    header = json.loads(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
    if not isinstance(header, dict) or not isinstance(header.get("kid"), str | None):
        raise ValueError("no header of a token")
    return header.get("kid")


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by its name, or by the way to it through nested claims; None if there is none."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _read_claim(setting: str, text: str, usual: str) -> tuple[str, list[tuple[str, str]]]:
    """Read `CLAIM: name, value=name`.

    Returns:
        The claim, which is `usual` without a colon; (value, name) of each entry.

    Raises:
        ConfigError: Nothing stands before the colon.
    """
    claim, colon, names = f"{text} ".partition(": ")
    if not colon:
        claim, names = usual, text
    if not claim.strip():
        raise ConfigError(f"{setting}: name the claim before the colon")
    entries = [entry.strip().rpartition("=") for entry in names.split(",") if entry.strip()]
    return claim.strip(), [(value or name, name) for value, _, name in entries]


def _tenant(entry: tuple[str, str]) -> tuple[str, str]:
    """Check (value, tenant)."""
    if not is_tenant_name(entry[1]):
        raise ConfigError(
            f"RAGKV_OIDC_TENANTS: {entry[1]!r} is neither tenant nor value=tenant; a tenant's name has 1 to 63 "
            "letters, digits and hyphens"
        )
    return entry


def _role(entry: tuple[str, str]) -> tuple[str, Role]:
    """Check (value, role)."""
    value, name = entry
    for role in ROLES:
        if role == name:
            return value, role
    raise ConfigError(f"RAGKV_OIDC_ROLES: {name!r} is neither reader nor writer, nor VALUE=reader")
