"""`/metrics`: metrics for Prometheus and programs that read its format."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from ragkv.api.observability.metrics import OPENMETRICS, MetricsCollector
from ragkv.api.routes.dependencies import PROBLEMS, READING, TenantDep
from ragkv.api.runtime.peers import Peers

router = APIRouter()

_TEXT = {"schema": {"type": "string"}, "example": 'ragkv_tokens_total{kind="context"} 2048.0\n'}
_CONTENT = {"text/plain": _TEXT, OPENMETRICS: _TEXT}


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        **{status: PROBLEMS[status] for status in (*READING, 401, 403, 422)},
        200: {"description": "The metrics", "content": _CONTENT},
    },
)
async def metrics(request: Request, tenant: TenantDep) -> Response:
    """Counters and gauges of the whole service, as Prometheus text, or as OpenMetrics if `Accept` names it. They are
    sums since the start and no ratios, so that the reader chooses the time span of a ratio. Counters with the label
    `tenant` are those of the key's own tenant, for an operator those of all tenants. Several replicas are told apart by
    the label `replica`."""
    collector: MetricsCollector = request.app.state.metrics
    shown = None if tenant.name in request.app.state.operators else tenant.name
    peers: Peers = request.app.state.peers
    replicas = {peers.name: collector.families(), **await peers.metrics()} if peers.name else None
    text, media_type = collector.render(request.headers.get("accept", ""), shown, replicas)
    return Response(text, headers={"content-type": media_type})
