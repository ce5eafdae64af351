"""`ragkv doctor` on serving: keys, address and limits of a service here, or the state of one elsewhere."""

from __future__ import annotations

import ipaddress
import os
import shutil
from typing import TYPE_CHECKING, Any

from ragkv.cli.documents import allowance
from ragkv.cli.findings import Findings
from ragkv.errors import ConfigError, without_password

if TYPE_CHECKING:
    import httpx2

    from ragkv.config import Settings

_SECONDS = 5.0
"""Timeout of a request to a service."""
_LITTLE = 2**30
"""Free bytes of a disk below which it counts as full."""


def keys(settings: Settings, findings: Findings) -> None:
    """Print how many tenants may use the service; never keys or hashes."""
    from ragkv.api.middleware.authenticator import open_authenticator
    from ragkv.api.middleware.hosts import is_loopback, read_hosts

    with findings.checking("keys"):
        found = open_authenticator(settings)
        issuer = f", and tokens of {settings.issuer[0]}" if settings.oidc_issuer else ""
        if found:
            findings.ok("keys", f"{len(found.keys.entries)} API keys of {len(found.keys.tenants)} tenants{issuer}")
        elif is_loopback(settings.host):
            findings.ok("keys", "no API keys: whoever can use this machine can use the service")
        else:
            findings.note(
                "keys",
                f"no API keys, and {settings.host} can be reached from other machines: whoever reaches it can read, "
                "add and ask everything. Run `ragkv key TENANT` and set RAGKV_API_KEYS to the pair it prints, or "
                "RAGKV_HOST=127.0.0.1",
            )
        names = read_hosts(settings, bool(found)).names
        findings.fact("hosts", "any" if names is None else ", ".join(sorted({"localhost", "127.0.0.1", *names})))


def address(settings: Settings, findings: Findings) -> None:
    """Check whether `ragkv serve` could listen, or which program listens there."""
    from ragkv.api.app import bracketed, listen

    place = f"{bracketed(settings.host)}:{settings.port}"
    try:
        listen(settings.host, settings.port).close()
    except ConfigError as error:
        status = _ragkv_at(settings)
        if status:
            findings.ok("address", f"a ragkv serves at {place} already: {status}")
        else:
            findings.note("address", f"{error} (RAGKV_HOST, RAGKV_PORT)")
        return
    findings.ok("address", f"{place if settings.port else 'any port'} is free for `ragkv serve`")


def _ragkv_at(settings: Settings) -> str:
    """The status of a ragkv that listens at our address; "" if none does."""
    import httpx2

    from ragkv.api.app import bracketed

    try:
        host = ipaddress.ip_address(settings.host)
        near = str({4: "127.0.0.1", 6: "::1"}[host.version] if host.is_unspecified else host)
    except ValueError:
        near = settings.host
    try:
        url = f"http://{bracketed(near)}:{settings.port}/healthz"
        return _status(httpx2.get(url, timeout=_SECONDS, trust_env=False))
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return ""


def limits(settings: Settings, findings: Findings) -> None:
    """Print time limits, limits of files and answers, and the resources of this machine."""
    line = f"{settings.batch} answers at once, {settings.queue} requests may wait, {settings.deadline:g} s an answer"
    findings.fact("line", line)
    files = f"files that need a parser: {settings.parse_seconds:g} s and {_size(settings.parse_bytes)} each"
    findings.fact("files", files)
    if settings.ocr:
        with findings.checking("ocr"):
            allowed = allowance(settings)
            findings.ok("ocr", f"scanned PDFs: up to {allowed.ocr_pages} pages and {allowed.ocr_seconds:g} s each")
    if os.geteuid() == 0:
        findings.note("files", "root cannot be kept from starting processes: serve as an ordinary user")
    pools = settings.host_bytes + settings.conversation_bytes + settings.batch_bytes
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    words = (
        f"RAGKV_HOST_BYTES, RAGKV_CONVERSATION_BYTES and RAGKV_BATCH_BYTES may take {_size(pools)} of {_size(there)}"
    )
    if pools > there:
        findings.note("memory", f"{words}: lower them")
    else:
        findings.fact("memory", words)
    folder = settings.data.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < _LITTLE:
        findings.note(
            "disk", f"{_size(free)} free for {settings.data}: make room, or KV is not stored and documents fail"
        )
    else:
        findings.ok("disk", f"{_size(free)} free for {settings.data}")


def service(settings: Settings, findings: Findings) -> None:
    """Print the state that the service at `url` reports."""
    import httpx2

    place, key = without_password(settings.url.rstrip("/")), settings.key.get_secret_value()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx2.Client(base_url=settings.url, headers=headers, timeout=_SECONDS) as client:
            status = _status(client.get("/healthz"))
            if not status:
                findings.fault("service", f"what answers at {place} is no ragkv: look at RAGKV_URL")
                return
            _health(place, status, findings)
            _ready(client.get("/readyz"), bool(key), findings)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        reason = without_password(str(error)) or type(error).__name__
        findings.fault("service", f"no answer from {place} ({reason}); is `ragkv serve` running there?")
    findings.fact("parts", "those of the service; to look at this machine's and its settings, unset RAGKV_URL")


def _health(place: str, status: str, findings: Findings) -> None:
    if status == "failed":
        findings.fault("service", f"{place}: its engine has ended: restart it, its log says why")
    elif status == "ok":
        findings.ok("service", f"{place}: ok")
    else:
        findings.note("service", f"{place}: {status}")


def _ready(response: httpx2.Response, key: bool, findings: Findings) -> None:
    """Print the answer of /readyz, check by check."""
    if response.status_code == 401:
        words = "the key in RAGKV_KEY is not known there" if key else "it wants an API key: set RAGKV_KEY"
        findings.fault("ready", f"not known: {words} (`ragkv key TENANT` makes one, RAGKV_API_KEYS there lets it in)")
        return
    content = _object(response)
    for name, check in dict(content.get("checks", {})).items():
        tell = {"ok": findings.ok, "failed": findings.fault}.get(check["status"], findings.note)
        tell(name, check["detail"] or check["status"])
    queue = content.get("queue", {})
    if content.get("status") == "ready" and queue:
        findings.ok("ready", f"{queue['waiting']} of {queue['places']} places taken, {queue['running']} being answered")
    elif content.get("status") != "ready":
        findings.fault("ready", "no questions are answered now")


def _status(response: httpx2.Response) -> str:
    """The status in the answer of /healthz; "" if it is not from a ragkv."""
    status = _object(response).get("status")
    return status if isinstance(status, str) and "x-request-id" in response.headers else ""


def _object(response: httpx2.Response) -> dict[str, Any]:
    try:
        content = response.json()
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
