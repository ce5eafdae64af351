"""An OpenID Connect issuer: a server on 127.0.0.1 with a discovery document and a key set, and what signs tokens."""

from __future__ import annotations

import base64
import json
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from joserfc import jwt
from joserfc.errors import SecurityWarning
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry
from joserfc.registry import HeaderParameter

AUDIENCE = "ragkv"


class Issuer:
    """The issuer.

    Attributes:
        url: Its address, which tokens name.
        keys: Private keys by id, which the key set publishes without their secrets.
        discovery: Replaces members of the discovery document.
        asked: Paths that were asked for.
        status: Status of every answer.
    """

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"
        self.keys: dict[str, Key] = {"one": RSAKey.generate_key(2048, {"kid": "one"})}
        self.discovery: dict[str, Any] = {}
        self.asked: list[str] = []
        self.status = 200

    def answer(self, path: str) -> Any:
        """Return what is at a path."""
        self.asked.append(path)
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.discovery}
        return {"keys": [_published(key) for key in self.keys.values()]}

    def claims(self, **changed: Any) -> dict[str, Any]:
        """Return the claims of a valid token of a writer, with changes; None leaves a claim out."""
        now = int(time.time())
        good = {"iss": self.url, "aud": AUDIENCE, "sub": "ada", "exp": now + 300, "iat": now, "tenant": "acme"}
        made = {**good, "roles": ["writer"], **changed}
        return {name: value for name, value in made.items() if value is not None}

    def token(self, key: str = "one", alg: str = "RS256", header: dict[str, Any] | None = None, **claims: Any) -> str:
        """Sign a token with one of the keys."""
        extension = {"x": HeaderParameter("an extension", "int")}
        registry = JWSRegistry(extension, algorithms=[alg], strict_check_header=False)
        named = {"alg": alg, "kid": key, **(header or {})}
        with warnings.catch_warnings(action="ignore", category=SecurityWarning):
            return jwt.encode(named, self.claims(**claims), self.keys[key], registry=registry)


def new_key(kind: str, kid: str) -> Key:
    """Make a key for an algorithm."""
    if kind == "EdDSA":
        return OKPKey.generate_key("Ed25519", {"kid": kid})
    if kind == "ES256":
        return ECKey.generate_key("P-256", {"kid": kid})
    if kind == "HS256":
        return OctKey.generate_key(256, {"kid": kid})
    return RSAKey.generate_key(2048, {"kid": kid})


def encoded(part: Any) -> str:
    """Encode a part of a token."""
    raw = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _published(key: Key) -> Any:
    return key.as_dict(private=isinstance(key, OctKey))


@contextmanager
def issuing(port: int = 0) -> Iterator[Issuer]:
    """Run an issuer."""
    issuer: Issuer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps(issuer.answer(self.path)).encode()
            self.send_response(issuer.status)
            if issuer.status == 302:
                self.send_header("Location", f"{issuer.url}/keys")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        issuer = Issuer(server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield issuer
        server.shutdown()
