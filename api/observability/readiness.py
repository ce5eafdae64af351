"""Readiness checks: what questions need to be answered, and what only slows them down."""

from __future__ import annotations

from typing import Any


def readiness_checks(health: dict[str, Any], stopping: bool) -> dict[str, dict[str, str]]:
    """Return the `status` and `detail` of each check.

    The status is `ok`, `failed` (no question can be answered now) or `degraded` (questions are answered more slowly, or
    the next one is refused with a time to come back).

    Args:
        health: Health of the engine thread.
        stopping: Whether the shutdown has started.
    """
    serving = health["status"] in ("ok", "degraded")
    engine = "the service is shutting down" if stopping else "" if serving else health.get("reason", health["status"])
    catalogue = health.get("catalogue", "" if "documents" in health else health.get("reason", "not known"))
    store, reuse, index = (health.get(name, "not known") for name in ("store", "reuse", "index"))
    change = health.get("reembedding")
    full = health["waiting"] >= health["queue"]
    return {
        "engine": _check(engine, "failed"),
        "catalogue": _check(catalogue, "failed"),
        "index": _check(_progress(change) if change else "" if index == "ok" else index, "degraded"),
        "store": _check("" if store == "ok" else store, "degraded"),
        "reuse": _check("" if reuse == "on" else reuse, "degraded"),
        "queue": _check("the queue is full" if full else "", "degraded"),
    }


def _progress(change: dict[str, Any]) -> str:
    return "the embedder changes from {from} to {to}: {done} of {total} chunks are embedded again".format(**change)


def _check(fault: str, status: str) -> dict[str, str]:
    return {"status": status if fault else "ok", "detail": fault}
