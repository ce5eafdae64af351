"""Readiness: what has to be right for questions to be answered, and what should be."""

from __future__ import annotations

from typing import Any


def checks(health: dict[str, Any], stopping: bool) -> dict[str, dict[str, str]]:
    """Each check's `status` and `detail`. `failed`: no questions are answered now · `degraded`: they are, more slowly,
    or the next one is told when to come back.

    health: of the worker · stopping: whether shutdown has begun.
    """
    serving = health["status"] in ("ok", "degraded")
    engine = "the service is shutting down" if stopping else "" if serving else health.get("reason", health["status"])
    store, reuse, index = (health.get(name, "not known") for name in ("store", "reuse", "index"))
    full = health["waiting"] >= health["queue"]
    return {
        "engine": _check(engine, "failed"),
        "catalogue": _check("" if "documents" in health else health.get("reason", "not known"), "failed"),
        "index": _check("" if index == "ok" else index, "failed"),
        "store": _check("" if store == "ok" else store, "degraded"),
        "reuse": _check("" if reuse == "on" else reuse, "degraded"),
        "queue": _check("there is no place left" if full else "", "degraded"),
    }


def _check(fault: str, otherwise: str) -> dict[str, str]:
    return {"status": otherwise if fault else "ok", "detail": fault}
