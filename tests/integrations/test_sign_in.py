"""Tokens of an OpenID Connect issuer: who gets in, who does not, and what happens while the issuer is away."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("joserfc")
from joserfc import jwe, jwt
from joserfc.jwk import RSAKey

from ragkv.api.app import create_app
from ragkv.api.middleware import issuer as issuer_module
from ragkv.api.middleware.authenticator import Authenticator
from ragkv.api.middleware.issuer import FRESH_SECONDS, KEPT_SECONDS, RETRY_SECONDS, IssuerKeys
from ragkv.api.middleware.keys import Keys, make_key
from ragkv.api.middleware.tokens import ALGORITHMS, LEEWAY, TokenVerifier, read_rules
from ragkv.api.runtime.callers import Caller, IssuerAway
from ragkv.api.runtime.tenants import Tenant
from ragkv.config import SignInSettings, load_settings
from ragkv.errors import ConfigError
from tests.api.conftest import HARBOUR, Service, serving, settings
from tests.integrations.issuer import AUDIENCE, Issuer, encoded, issuing, new_key
from tests.mcp_calls import over_http

pytestmark = pytest.mark.integrations

ASK = {"question": "Who built the harbour of Tarn?"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Who built the harbour of Tarn?"}]}


@dataclass(frozen=True)
class Company:
    """A service that accepts tokens of an issuer for the tenants acme and zeta, and a key of the tenant robots.

    Attributes:
        service: The service.
        issuer: The issuer.
        key: The key.
        audit: Its audit file.
    """

    service: Service
    issuer: Issuer
    key: str
    audit: Path

    def get(self, token: str, path: str = "/v1/documents") -> httpx.Response:
        """Read something with a token."""
        return httpx.get(f"{self.service.url}{path}", headers={"Authorization": f"Bearer {token}"}, timeout=60)

    def client(self, **claims: Any) -> httpx.Client:
        """A client with a token."""
        headers = {"Authorization": f"Bearer {self.issuer.token(**claims)}"}
        return httpx.Client(base_url=self.service.url, timeout=60, headers=headers)


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    folder, (key, pair) = tmp_path_factory.mktemp("company"), make_key("robots")
    audit = folder / "audit.jsonl"
    with issuing() as issuer:
        issuer.keys |= {kind: new_key(kind, kind) for kind in ("ES256", "EdDSA", "HS256")}
        chosen = settings(
            folder / "data",
            api_keys=pair,
            oidc_issuer=f"{issuer.url} {AUDIENCE}",
            oidc_tenants="acme, 3f2a=zeta",
            audit_log=str(audit),
        )
        with serving(chosen) as service:
            yield Company(service, issuer, key, audit)


# Who gets in


@pytest.mark.parametrize(("key", "alg"), [("one", "RS256"), ("one", "PS384"), ("ES256", "ES256"), ("EdDSA", "EdDSA")])
def test_a_token_that_the_issuer_signed_opens_its_tenant(company: Company, key: str, alg: str) -> None:
    assert company.get(company.issuer.token(key, alg)).status_code == 200


def test_a_token_is_the_tenant_and_the_role_that_it_names(company: Company) -> None:
    with company.client() as writer, company.client(roles="openid reader", sub="bob") as reader:
        assert writer.post("/v1/documents?wait=true", json=HARBOUR).json()["status"] == "completed"
        assert reader.post("/v1/answers", json=ASK).json()["answer"] == "Ada Brook"
        assert reader.post("/v1/chat/completions", json=CHAT).status_code == 200
        for refused in (reader.post("/v1/documents", json=HARBOUR), reader.delete("/v1/documents/harbour")):
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    with company.client(tenant="3f2a") as other:
        assert other.get("/v1/collections").json() == {"collections": []}
    with company.client(roles=["reader", "writer", 7]) as both:
        assert both.delete("/v1/documents/harbour").status_code == 204, "who has both roles is a writer"
    events = [json.loads(line) for line in company.audit.read_text().splitlines()]
    told = [(each["tenant"], each["subject"], each["action"], each["result"]) for each in events]
    assert told == [
        ("acme", "ada", "ingest", "accepted"),
        ("acme", "ada", "ingest", "added"),
        ("acme", "bob", "ingest", "forbidden"),
        ("acme", "bob", "delete", "forbidden"),
        ("acme", "ada", "delete", "deleted"),
    ]


def test_a_token_counts_at_the_openai_route_and_mcp(company: Company) -> None:
    assert company.get(company.issuer.token(), "/v1/models").status_code == 200
    refused = company.get(company.issuer.token(aud="other"), "/v1/models")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_token")

    async def use(token: str) -> bool:
        async with over_http(company.service.url, token) as client:
            assert not (await client.call_tool("list_collections", {})).is_error
            return (await client.call_tool("ingest", {"documents": [HARBOUR], "collection": "by-mcp"})).is_error

    assert asyncio.run(use(company.issuer.token(roles="reader")))
    assert not asyncio.run(use(company.issuer.token()))


def test_a_token_opens_the_dashboard_for_as_long_as_it_is_valid(company: Company) -> None:
    own = {"Origin": company.service.url}
    with httpx.Client(base_url=company.service.url) as browser:
        came = browser.post("/dashboard/login", data={"key": company.issuer.token(roles="reader")})
        assert came.status_code == 303
        assert browser.get("/v1/documents").status_code == 200
        assert browser.delete("/v1/documents/x", headers=own).json()["code"] == "forbidden"
        assert browser.post("/dashboard/login", data={"key": company.issuer.token(aud="x")}).status_code == 401
    with httpx.Client(base_url=company.service.url) as browser:
        ends = int(time.time()) - LEEWAY + 1  # a second is left of the leeway
        browser.post("/dashboard/login", data={"key": company.issuer.token(exp=ends)})
        assert browser.get("/v1/documents").status_code == 200
        time.sleep(2.1)
        assert browser.get("/v1/documents").status_code == 401


def test_an_api_key_counts_beside_tokens(company: Company) -> None:
    assert company.get(company.key).status_code == 200
    wrong = company.get("ragkv_wrong")
    assert (wrong.status_code, wrong.json()["code"]) == (401, "invalid_api_key")


# Who does not

NOW = time.time()
WRONG_CLAIMS: dict[str, dict[str, Any]] = {
    "expired": {"exp": int(NOW) - 3600},
    "without an end": {"exp": None},
    "an end that is no number": {"exp": "never"},
    "an end that no clock can show": {"exp": 10**400},
    "an end that is no finite number": {"exp": float("inf")},
    "an end that is a truth value": {"exp": True},
    "a beginning that no clock can show": {"nbf": -(10**400)},
    "issued at no time": {"iat": float("nan")},
    "not yet valid": {"nbf": int(NOW) + 3600},
    "issued in the future": {"iat": int(NOW) + 3600},
    "for another audience": {"aud": "other"},
    "for other audiences": {"aud": ["other", "ragkv-2"]},
    "without an audience": {"aud": None},
    "of another issuer": {"iss": "https://login.example.org"},
    "without an issuer": {"iss": None},
    "of an unknown tenant": {"tenant": "nobody"},
    "of a tenant with a key only": {"tenant": "robots"},
    "of several tenants": {"tenant": ["acme", "zeta"]},
    "of a value that stands for a tenant": {"tenant": "zeta"},
    "without a tenant": {"tenant": None},
    "without a role": {"roles": None},
    "with an unknown role": {"roles": ["admin"]},
    "with a role that is no text": {"roles": [["writer"], {"writer": 1}]},
    "with a role that is a part of a word": {"roles": "writers"},
    "without a subject": {"sub": None},
    "with a subject that is no text": {"sub": 7},
    "with half a character for a subject": {"sub": "\ud800"},
    "with an endless subject": {"sub": "a" * 300},
}


@pytest.mark.parametrize("what", WRONG_CLAIMS)
def test_a_signed_token_with_a_wrong_claim_is_refused(company: Company, what: str) -> None:
    refuse(company, company.issuer.token(**WRONG_CLAIMS[what]))


def unsigned(issuer: Issuer) -> str:
    return f"{encoded({'alg': 'none', 'kid': 'one'})}.{encoded(issuer.claims())}."


def signed_with_the_public_key(issuer: Issuer) -> str:
    head = f"{encoded({'alg': 'HS256', 'kid': 'one'})}.{encoded(issuer.claims())}"
    secret = issuer.keys["one"].as_pem(private=False)
    return f"{head}.{encoded(hmac.new(secret, head.encode(), hashlib.sha256).digest())}"


def signed_with_a_shared_secret(issuer: Issuer) -> str:
    return issuer.token("HS256", "HS256")


def signed_by_another(issuer: Issuer) -> str:
    return jwt.encode({"alg": "RS256", "kid": "one"}, issuer.claims(), RSAKey.generate_key(2048))


def signed_by_the_key_that_it_brings(issuer: Issuer) -> str:
    own = RSAKey.generate_key(2048)
    header = {"alg": "RS256", "kid": "one", "jwk": own.as_dict(private=False)}
    return jwt.encode(header, issuer.claims(), own)


def changed_afterwards(issuer: Issuer) -> str:
    head, _, signature = issuer.token(roles=["reader"]).split(".")
    return f"{head}.{encoded(issuer.claims())}.{signature}"


def with_the_signature_of_another(issuer: Issuer) -> str:
    head, body, _ = issuer.token().split(".")
    return f"{head}.{body}.{issuer.token(sub='bob').split('.')[2]}"


def with_an_extension_that_it_calls_critical(issuer: Issuer) -> str:
    return issuer.token(header={"crit": ["x"], "x": 1})


def encrypted(issuer: Issuer) -> str:
    header = {"alg": "RSA-OAEP-256", "enc": "A256GCM", "kid": "one"}
    return jwe.encrypt_compact(header, json.dumps(issuer.claims()), issuer.keys["one"], ["RSA-OAEP-256", "A256GCM"])


def endless(issuer: Issuer) -> str:
    return issuer.token(more="a" * 20_000)


def deep(issuer: Issuer) -> str:
    return f"{encoded(b'[' * 5000)}.{encoded(issuer.claims())}.x"


FORGED = [
    *(unsigned, signed_with_the_public_key, signed_with_a_shared_secret, signed_by_another),
    *(signed_by_the_key_that_it_brings, changed_afterwards, with_the_signature_of_another),
    *(with_an_extension_that_it_calls_critical, encrypted, endless, deep),
]


@pytest.mark.parametrize("forge", FORGED, ids=lambda forge: forge.__name__)
def test_a_forged_token_is_refused(company: Company, forge: Callable[[Issuer], str]) -> None:
    token = forge(company.issuer)
    refuse(company, token, "invalid_token" if token.count(".") == 2 else "invalid_api_key")


@pytest.mark.parametrize("token", ["..", "a.b.c", "e30.e30.e30", f"{encoded([])}.x.y", f"{encoded({'kid': 7})}.x.y"])
def test_what_only_looks_like_a_token_is_refused(company: Company, token: str) -> None:
    refuse(company, token)


def refuse(company: Company, token: str, code: str = "invalid_token") -> None:
    """Check that a token is refused, and that the answer is the same for every reason."""
    answer = company.get(token)
    assert (answer.status_code, answer.json()["code"]) == (401, code)
    if code == "invalid_token":
        assert answer.json()["detail"] == "this token is not valid here; sign in again for a new one"
        assert answer.headers["www-authenticate"] == 'Bearer realm="ragkv", error="invalid_token"'


def test_clocks_may_differ_by_the_leeway(company: Company) -> None:
    now = int(time.time())
    for claims in ({"exp": now - 2}, {"nbf": now + 2}, {"iat": now + 2}):
        assert company.get(company.issuer.token(**claims)).status_code == 200, claims


def test_no_algorithm_needs_a_secret() -> None:
    assert not [name for name in ALGORITHMS if name == "none" or name.startswith("HS")]


# The issuer's keys


class Clock:
    """A clock that the test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def verifier(issuer: Issuer, clock: Clock, **more: Any) -> TokenVerifier:
    given = {"oidc_issuer": f"{issuer.url} {AUDIENCE}", "oidc_tenants": "acme", **more}
    chosen = SignInSettings(**given)
    return TokenVerifier(read_rules(chosen, Keys()), IssuerKeys(issuer.url, chosen.issuer[2], clock))


def test_a_new_key_of_the_issuer_is_found_and_a_removed_one_is_not_used_for_ever() -> None:
    async def rotate() -> None:
        with issuing() as issuer:
            clock = Clock()
            verify = verifier(issuer, clock).caller_of
            old = issuer.token()
            assert await verify(old) is not None
            issuer.keys = {"two": new_key("RS256", "two")}
            clock.now += RETRY_SECONDS
            assert await verify(issuer.token("two")) is not None, "an unknown key makes it ask again"
            assert await verify(old) is None

    asyncio.run(rotate())


def test_keys_are_asked_for_again_when_they_are_old_and_nobody_waits_for_it() -> None:
    async def age() -> None:
        with issuing() as issuer:
            clock = Clock()
            verify = verifier(issuer, clock).caller_of
            token = issuer.token()
            assert await verify(token) is not None
            issuer.keys = {"two": new_key("RS256", "two")}
            clock.now += FRESH_SECONDS + 1
            assert await verify(token) is not None, "this one is still answered from what is known"
            for _ in range(200):
                await asyncio.sleep(0.01)
                if await verify(token) is None:
                    return
            raise AssertionError("the removed key is still used")

    asyncio.run(age())


def test_made_up_key_ids_do_not_make_the_service_ask_without_end() -> None:
    async def flood() -> None:
        with issuing() as issuer:
            clock = Clock()
            verify = verifier(issuer, clock).caller_of
            assert await verify(issuer.token()) is not None
            asked = len(issuer.asked)
            issuer.keys["made-up"] = new_key("RS256", "made-up")
            made_up = issuer.token("made-up")
            del issuer.keys["made-up"]
            await asyncio.gather(*(verify(made_up) for _ in range(20)))
            assert len(issuer.asked) == asked, "the last fetch was a moment ago"
            clock.now += RETRY_SECONDS
            assert await asyncio.gather(*(verify(made_up) for _ in range(20))) == [None] * 20
            assert issuer.asked[asked:] == ["/.well-known/openid-configuration", "/keys"]

    asyncio.run(flood())


def test_the_first_tokens_wait_for_one_fetch_together() -> None:
    async def crowd() -> None:
        with issuing() as issuer:
            verify, token = verifier(issuer, Clock()).caller_of, issuer.token()
            assert None not in await asyncio.gather(*(verify(token) for _ in range(20)))
            assert len(issuer.asked) == 2

    asyncio.run(crowd())


def test_while_the_issuer_is_away_known_keys_count_for_a_day() -> None:
    async def lose() -> None:
        clock = Clock()
        with issuing() as issuer:
            made = verifier(issuer, clock)
            token, port = issuer.token(), int(issuer.url.rpartition(":")[2])
            keys = issuer.keys
            assert await made.caller_of(token) is not None
        clock.now += KEPT_SECONDS - 1
        assert await made.caller_of(token) is not None
        assert made._keys._fetching is not None
        await asyncio.wait_for(made._keys._fetching, 60)
        assert await made.caller_of(token) is not None, "the fetch that failed changes nothing"
        clock.now += 2 + RETRY_SECONDS
        with pytest.raises(IssuerAway):
            await made.caller_of(token)
        with issuing(port) as back:
            back.keys = keys
            with pytest.raises(IssuerAway):
                await made.caller_of(token)
            clock.now += RETRY_SECONDS
            assert await made.caller_of(token) is not None

    asyncio.run(lose())


def test_a_service_whose_issuer_never_answered_starts_and_says_that_it_cannot_verify(tmp_path: Path) -> None:
    with issuing() as issuer:
        token, url = issuer.token(), issuer.url
    key, pair = make_key("acme")
    with serving(settings(tmp_path, api_keys=pair, oidc_issuer=f"{url} {AUDIENCE}")) as service:
        for path in ("/v1/documents", "/v1/models"):
            answer = httpx.get(service.url + path, headers={"Authorization": f"Bearer {token}"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
            assert url not in answer.text
        assert httpx.post(f"{service.url}/dashboard/login", data={"key": token}).status_code == 503
        assert httpx.get(f"{service.url}/v1/documents", headers={"X-API-Key": key}).status_code == 200
        assert httpx.get(f"{service.url}/healthz").status_code == 200


@pytest.mark.parametrize(
    ("discovery", "status"),
    [
        ({"issuer": "https://evil.example"}, 200),
        ({"jwks_uri": "http://localhost:1/keys"}, 200),
        ({"jwks_uri": None}, 200),
        ({"more": "a" * 2**20}, 200),
        ({}, 302),
        ({}, 500),
    ],
    ids=["another issuer", "keys elsewhere", "no keys", "too large", "redirected", "an error"],
)
def test_keys_come_from_the_issuer_itself_only(discovery: dict[str, Any], status: int) -> None:
    async def ask() -> None:
        with issuing() as issuer:
            token, issuer.discovery, issuer.status = issuer.token(), discovery, status
            with pytest.raises(IssuerAway):
                await verifier(issuer, Clock()).caller_of(token)
            assert issuer.asked == ["/.well-known/openid-configuration"]

    asyncio.run(ask())


def test_keys_may_be_elsewhere_where_a_setting_says_so() -> None:
    async def ask() -> None:
        with issuing() as issuer, issuing() as elsewhere:
            elsewhere.keys = issuer.keys
            made = verifier(issuer, Clock(), oidc_issuer=f"{issuer.url} {AUDIENCE} {elsewhere.url}/keys")
            assert await made.caller_of(issuer.token()) is not None
            assert (issuer.asked, elsewhere.asked) == ([], ["/keys"])

    asyncio.run(ask())


def test_a_token_without_a_key_id_is_of_the_only_key() -> None:
    async def ask() -> None:
        with issuing() as issuer:
            bare = jwt.encode({"alg": "RS256"}, issuer.claims(), issuer.keys["one"])
            assert await verifier(issuer, Clock()).caller_of(bare) is not None
            issuer.keys["two"] = new_key("RS256", "two")
            assert await verifier(issuer, Clock()).caller_of(bare) is None

    asyncio.run(ask())


def test_a_key_for_encryption_verifies_no_token() -> None:
    async def ask() -> None:
        with issuing() as issuer:
            issuer.keys["one"] = RSAKey.generate_key(2048, {"kid": "one"})
            token = issuer.token()
            issuer.keys["one"] = RSAKey.import_key({**issuer.keys["one"].as_dict(private=True), "use": "enc"})
            assert await verifier(issuer, Clock()).caller_of(token) is None

    asyncio.run(ask())


def test_claims_may_be_nested_and_named_like_addresses() -> None:
    async def ask() -> None:
        with issuing() as issuer:
            made = verifier(
                issuer,
                Clock(),
                oidc_tenants="https://example.org/tenant: acme",
                oidc_roles="access.roles: viewer=reader, editor=writer, owner=writer",
            )
            claims = {"https://example.org/tenant": "acme", "access": {"roles": ["owner"]}}
            caller = await made.caller_of(issuer.token(**claims, tenant=None, roles=None))
            assert caller is not None
            assert (caller.tenant, caller.role) == (Tenant("acme"), "writer")
            assert await made.caller_of(issuer.token(**{**claims, "access": ["owner"]})) is None

    asyncio.run(ask())


def test_a_whole_issuer_may_be_one_tenant() -> None:
    async def ask() -> None:
        with issuing() as issuer:
            whole = SignInSettings(
                oidc_issuer=f"{issuer.url} {AUDIENCE}",
                oidc_tenants=f"iss: {issuer.url}=acme",
            )
            made = TokenVerifier(read_rules(whole, Keys()), IssuerKeys(issuer.url))
            caller = await made.caller_of(issuer.token(tenant=None))
            assert caller is not None
            assert caller.tenant == Tenant("acme")

    asyncio.run(ask())


# Settings


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"oidc_issuer": "https://login.example.org"}, "RAGKV_OIDC_ISSUER: name the audience"),
        ({"oidc_tenants": ""}, "RAGKV_OIDC_TENANTS"),
        ({"oidc_tenants": "a b"}, "RAGKV_OIDC_TENANTS"),
        ({"oidc_tenants": ": acme"}, "RAGKV_OIDC_TENANTS: name the claim"),
        ({"oidc_roles": ""}, "RAGKV_OIDC_ROLES"),
        ({"oidc_roles": "roles:"}, "RAGKV_OIDC_ROLES"),
        ({"oidc_roles": "all=reader, all=writer"}, "RAGKV_OIDC_ROLES"),
        ({"oidc_roles": "roles: owner"}, "RAGKV_OIDC_ROLES: 'owner' is neither"),
        ({"oidc_roles": ": reader"}, "RAGKV_OIDC_ROLES: name the claim"),
        ({"oidc_issuer": "http://login.example.org ragkv"}, "https"),
        ({"oidc_issuer": "login.example.org ragkv"}, "RAGKV_OIDC_ISSUER"),
        ({"oidc_issuer": "https://login.example.org ragkv http://login.example.org/keys"}, "RAGKV_OIDC_ISSUER"),
        ({"oidc_issuer": "https://login.example.org ragkv https://login.example.org/keys more"}, "oidc_issuer"),
    ],
)
def test_settings_that_would_let_in_nobody_or_everybody_are_refused(wrong: dict[str, str], told: str) -> None:
    good = {"oidc_issuer": f"https://login.example.org {AUDIENCE}", "oidc_tenants": "acme"}
    with pytest.raises(ConfigError, match=told):
        create_app(load_settings(**{**good, **wrong, "dashboard": False}))


def test_tickets_without_keys_are_valid_in_the_process_that_issued_them() -> None:
    one, other = Authenticator(Keys()), Authenticator(Keys())
    assert one.tickets.secret != other.tickets.secret
    assert issuer_module.RETRY_SECONDS > 0
    assert other.tickets.caller_of(one.tickets.issue(Caller(Tenant("acme"), "ada"))) is None
