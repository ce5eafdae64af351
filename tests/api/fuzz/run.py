"""A run of hostile requests against one service."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.api.fuzz.attacks import ATTACKS
from tests.api.fuzz.fuzzed import FuzzedService, Seen
from tests.api.fuzz.requests import operations, requests
from tests.api.fuzz.wire import Request

WAITING = 4
"""Requests whose jobs wait while the service is killed."""


def fuzz(folder: Path, cases: int, restarts: int, chance: int | None = None) -> Seen:
    """Send the known attacks and then generated requests, and kill and start the service now and then.

    Nothing is made smaller and nothing ends the run at the first fault: the report lists one request for each kind of
    fault, with a command line that sends it again.

    Args:
        folder: For the data of the service.
        cases: How many requests in all.
        restarts: How often the service is killed.
        chance: Seed of the generated requests; None for the same ones in every run.

    Returns:
        What the run has seen.
    """
    service = FuzzedService(folder)
    latest = deque[Request](maxlen=WAITING)
    every = cases // restarts

    def check(request: Request) -> None:
        service.check(request)
        if request.wire.startswith((b"POST /v1/documents", b"PUT /v1/documents")) and not request.cut:
            latest.append(request)
        if service.seen.sent.total() % every == 0:
            service.restart(latest)

    @settings(
        max_examples=cases - len(ATTACKS),
        database=None,
        deadline=None,
        derandomize=chance is None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(request=requests(operations(service.document)))
    def generated(request: Request) -> None:
        check(request)

    try:
        for attack in ATTACKS:
            check(attack)
        (generated if chance is None else seed(chance)(generated))()
    finally:
        service.close()
    return service.seen
