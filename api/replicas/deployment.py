"""The deployment of Ray Serve: a replica is a process with the whole application, from the engine to the routes."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import ray
from fastapi import FastAPI
from prometheus_client.core import Metric
from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from ragkv.api.app import DRAIN_SECONDS, REJECT_SECONDS, create_app
from ragkv.api.observability.logs import configured_logging
from ragkv.api.observability.readiness import readiness_checks
from ragkv.api.replicas.peers import ReplicaPeers
from ragkv.api.replicas.settings import check_settings
from ragkv.api.runtime.answer_history import RecordedAnswer
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.rate_limits import RateLimiter, Resource
from ragkv.config import ServingSettings, Settings, load_settings
from ragkv.errors import NotFound, RagkvError

NAME = "ragkv"
"""Of the application and of its deployment."""
HEALTH_SECONDS = 2.0
"""Time between two health checks of a replica."""
HEALTH_TIMEOUT = 10.0
"""Longest time of a health check."""
MOST_REQUESTS = 10_000
"""Requests that Ray gives a replica at a time. The replica has a queue, and refuses what does not fit there."""


@serve.ingress()
class Replica:
    """One replica. Ray makes it, checks its health, and ends it."""

    def __init__(self, settings: Settings):
        """Create the application. Ray runs its lifespan, which opens the engine.

        Args:
            settings: Settings of the service.
        """
        # Ray puts a logger of its own in place of sys.stdout. It passes on what comes out of the real one.
        self._logging = configured_logging(settings.log, settings.log_level, sys.__stdout__ or sys.stdout)
        self._logging.__enter__()
        self._app = create_app(settings)
        self._peers = self._app.state.peers = ReplicaPeers()
        self._engine_thread: EngineThread = self._app.state.engine_thread
        self._limiter: RateLimiter = self._app.state.limiter
        self._sockets = SocketsMiddleware(self._app)
        self._exchange_in_lifespan()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application. Ray calls this."""
        return self._sockets

    def check_health(self) -> None:
        """Raise RagkvError if no question can be answered. Ray then replaces this replica."""
        checks = readiness_checks(self._engine_thread.health(), stopping=False)
        failed = [f"{name}: {check['detail']}" for name, check in checks.items() if check["status"] == "failed"]
        if failed:
            raise RagkvError("; ".join(failed))

    async def end(self, seconds: float = DRAIN_SECONDS) -> tuple[str, None]:
        """Begin the shutdown: accept nothing new, queue the running document again, and end what follows for ever.

        Args:
            seconds: Time until requests that are not done are rejected.
        """
        self._engine_thread.pause(seconds)
        self._sockets.close()
        asyncio.get_running_loop().call_later(max(0.0, seconds - REJECT_SECONDS), self._engine_thread.reject_waiting)
        return self._peers.name, None

    async def reply_answers(self, tenant: str, limit: int, before: float) -> tuple[str, list[RecordedAnswer]]:
        """Reply to `ReplicaPeers.answers`."""
        service = self._engine_thread.catalog_service
        return self._peers.name, await asyncio.to_thread(service.answers, tenant, limit, before)

    async def reply_answer(self, tenant: str, id: str) -> tuple[str, RecordedAnswer | None]:
        """Reply to `ReplicaPeers.answer`."""
        with suppress(NotFound):
            return self._peers.name, await asyncio.to_thread(self._engine_thread.catalog_service.answer, tenant, id)
        return self._peers.name, None

    async def drop_conversation(self, collection: str, conversation: str) -> tuple[str, None]:
        """Reply to `ReplicaPeers.drop_conversation`."""
        with suppress(RagkvError):
            self._engine_thread.forget_conversation((collection, conversation))
        return self._peers.name, None

    async def reply_metrics(self) -> tuple[str, list[Metric]]:
        """Reply to `ReplicaPeers.metrics`."""
        return self._peers.name, self._app.state.metrics.families(shared=False)

    async def reply_usage(self) -> tuple[str, Mapping[str, Counter[Resource]]]:
        """Reply to `ReplicaPeers.exchange`."""
        return self._peers.name, self._limiter.totals() if self._limiter.limited else {}

    def _exchange_in_lifespan(self) -> None:
        inner = self._app.router.lifespan_context

        def end() -> None:
            self._engine_thread.jobs.pause()
            self._sockets.close()

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with inner(app):
                exchange = asyncio.create_task(self._peers.exchange(self._limiter, end))
                try:
                    yield
                finally:
                    exchange.cancel()
                    with suppress(asyncio.CancelledError):
                        await exchange

        self._app.router.lifespan_context = lifespan


class SocketsMiddleware:
    """ASGI middleware that can close the WebSockets of the dashboard, for which a replica would wait at its end."""

    def __init__(self, app: ASGIApp):
        self.app = app
        self._open: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the connection on."""
        if scope["type"] != "websocket":
            return await self.app(scope, receive, send)
        serving = asyncio.ensure_future(self.app(scope, receive, send))
        self._open.add(serving)
        try:
            await serving
        except asyncio.CancelledError:
            if not serving.cancelled() or (own := asyncio.current_task()) is None or own.cancelling():
                serving.cancel()
                raise
            with suppress(RuntimeError):
                await send({"type": "websocket.close", "code": 1012})  # the service restarts
        finally:
            self._open.discard(serving)

    def close(self) -> None:
        """Close all WebSockets."""
        for socket in self._open:
            socket.cancel()


def build_application(settings: Settings, gpus: int, cpus: float) -> serve.Application:
    """Return the application for `serve.run`.

    Args:
        settings: Settings of the service.
        gpus: GPUs of a replica.
        cpus: CPUs that a replica is counted for.
    """
    serving = settings.part(ServingSettings)
    least, most = (max(1, count) for count in serving.replica_counts)
    autoscaling: dict[str, Any] = {"num_replicas": least}
    if most > least:
        target = max(1.0, serving.batch / 2)  # a replica decodes so many together without delay
        autoscaling = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "target_ongoing_requests": target,
                "upscale_delay_s": 10,
                "downscale_delay_s": 300,
            }
        }
    deployment = serve.deployment(
        Replica,
        name=NAME,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        max_ongoing_requests=MOST_REQUESTS,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=serving.deadline + DRAIN_SECONDS,
        request_router_config={"request_router_class": "ragkv.api.replicas.router:LocalityRouter"},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        **autoscaling,
    )
    return deployment.bind(settings)


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application for Ray's own ways to deploy: `serve deploy` and KubeRay's RayService.

    Ray calls this for the import path `ragkv.api.replicas.deployment:application`, on a machine of its cluster.

    Args:
        arguments: Settings by name. They win over those of the environment. `threads` is also how many CPUs a replica
            is counted for; with `device` cuda a replica has a GPU, with auto if the cluster has GPUs by now.

    Raises:
        ConfigError: The settings are wrong, or do not allow replicas.
    """
    settings = load_settings(**arguments)
    check_settings(settings)
    threads = settings.threads or 1
    found = settings.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    gpus = int(found or settings.device == "cuda")
    return build_application(settings.model_copy(update={"threads": threads}), gpus, float(threads))
