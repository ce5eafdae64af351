"""`ragkv serve --replicas`: start Ray and the replicas, replace them on SIGHUP, end them on SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import queue
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from ragkv.api.app import DRAIN_SECONDS, address_of, listen, why_exposed
from ragkv.api.replicas.proxy import CALLBACK
from ragkv.api.replicas.settings import check_settings
from ragkv.config import Settings, offer_environment, ray_address
from ragkv.errors import ConfigError
from ragkv.model.processors import usable_processors

if TYPE_CHECKING:
    from rich.console import Console

OBJECT_STORE = 256 * 2**20
"""Bytes of Ray's object store. Only large bodies of requests pass through it."""
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": CALLBACK,
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
}
"""What Ray and its processes read at their start: no telemetry, our middleware in the proxy, quiet logs.
Ray would kill a proxy that a busy machine does not start in five seconds."""


def serve_replicas(settings: Settings, reload: Callable[[], Settings], console: Console) -> None:
    """Run the service as replicas until a signal ends it.

    Args:
        settings: Settings of the service.
        reload: Reads the settings again, for SIGHUP.
        console: Shows where the service is.

    Raises:
        ConfigError: Ray is missing, the settings do not allow replicas, or the replicas do not start.
    """
    check_settings(settings)
    offer_environment(RAY_ENVIRONMENT)
    if not ray_address():
        # Who knows the token of Ray can run programs by it. This one is known to the processes of this service only.
        offer_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ConfigError(
            f"--replicas needs {error.name}, which is not installed: pip install 'ray[serve,data]>=2.60,<2.61'"
        ) from None
    with listen(settings.host, settings.port) as listener:
        port = listener.getsockname()[1]
    address = address_of(settings, port)
    if warning := why_exposed(settings, address):
        console.print(f"WARNING: {warning}", style="bold red")
    console.print(f"starting {settings.replica_counts[0]} replicas; the API will be at {address}", style="dim")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        cpus = start_ray(settings, port)
        deploy(settings, cpus)
        with signals() as waiting, suppress(Ended):
            console.print(f"serving at {address}", style="bold green")
            while True:
                wait_for(waiting)
                replace(reload, cpus, console)
        end()
    finally:
        serve.shutdown()
        ray.shutdown()
    console.print("stopped", style="dim")


def start_ray(settings: Settings, port: int) -> float:
    """Start Ray on this machine, or join the cluster of the settings, and start Ray's proxy.

    Returns:
        CPUs that a replica is counted for.

    Raises:
        ConfigError: Ray does not start.
    """
    import ray
    from ray import serve
    from ray.exceptions import RayError

    _, most = settings.replica_counts
    cpus = float(settings.threads or max(1, usable_processors() // most))
    joined: dict[str, Any] = {"namespace": "ragkv", "log_to_driver": True, "logging_level": logging.WARNING}
    own = {
        "num_cpus": int(cpus * most) + 1,
        "object_store_memory": OBJECT_STORE,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    try:
        address = ray_address()
        ray.init(address=address or "local", **joined, **({} if address else own))
        serve.start(
            proxy_location="EveryNode",
            http_options={"host": settings.host, "port": port, "keep_alive_timeout_s": 5},
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )
    except (RayError, ConnectionError, TimeoutError) as error:
        reason = str(error).strip().splitlines()
        raise ConfigError(f"Ray does not start: {reason[0] if reason else type(error).__name__}") from error
    return cpus


def deploy(settings: Settings, cpus: float) -> None:
    """Start the replicas, or replace them one after another. Returns when they are ready.

    Raises:
        ConfigError: They do not start, or there are not enough GPUs.
    """
    import ray
    from ray import serve

    from ragkv.api.replicas.deployment import NAME, build_application

    gpus = int(ray.cluster_resources().get("GPU", 0)) if settings.device != "cpu" else 0
    least, _ = settings.replica_counts
    if gpus and gpus < least:
        raise ConfigError(f"{least} replicas need as many GPUs, there are {gpus}; give fewer, or --device cpu")
    if not settings.threads and not gpus:
        settings = settings.model_copy(update={"threads": int(cpus)})
    application = build_application(settings, min(1, gpus), cpus)
    try:
        serve.run(application, name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise ConfigError(f"the replicas do not start: {error}") from None


def replace(reload: Callable[[], Settings], cpus: float, console: Console) -> None:
    """Replace the replicas by others with the settings as they are now. What prevents it is printed."""
    console.print("replacing the replicas, one after another", style="dim")
    try:
        settings = reload()
        check_settings(settings)
        deploy(settings, cpus)
    except ConfigError as error:
        console.print(f"the replicas are not replaced: {error}", style="bold red")
    else:
        console.print("the replicas are replaced", style="dim")


def end() -> None:
    """Let the requests in flight end, then the replicas."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    from ragkv.api.replicas.deployment import NAME

    with suppress(TimeoutError, RayError, RayServeException):  # a replica that does not hear of it ends when it is idle
        replies = serve.get_deployment_handle(NAME, NAME).broadcast("end", DRAIN_SECONDS)
        replies.results(timeout_s=2, return_exceptions=True)
    serve.delete(NAME)


class Ended(Exception):
    """SIGTERM or Ctrl-C came."""


@contextmanager
def signals() -> Iterator[queue.SimpleQueue[int]]:
    """Collect SIGHUP while the context is open, and raise Ended in this thread for SIGTERM and SIGINT."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()

    def end_now(number: int, frame: FrameType | None) -> None:
        for ending in (signal.SIGTERM, signal.SIGINT):  # the end is not interrupted by a second one
            signal.signal(ending, signal.SIG_IGN)
        raise Ended

    handlers: dict[int, Callable[[int, FrameType | None], None]] = {
        signal.SIGTERM: end_now,
        signal.SIGINT: end_now,
        signal.SIGHUP: lambda number, _: waiting.put(number),
    }
    for number, handler in handlers.items():
        signal.signal(number, handler)
    yield waiting


def wait_for(waiting: queue.SimpleQueue[int]) -> None:
    """Wait for SIGHUP. Python runs the handlers of signals in this thread, which must not sleep without end."""
    while True:
        with suppress(queue.Empty):
            waiting.get(timeout=0.2)
            return
