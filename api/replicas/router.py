"""The router of Ray Serve: a request goes to the home of what it is about, as ragkv/locality.py says."""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ragkv.locality import order_by_load


class LocalityRouter(RequestRouter):
    """Chooses the replica of a request by its key. Requests without a key go to the replica with the fewest.

    Ray knows how many requests of this router a replica works on. It tries the replicas of the answer in their order,
    until one accepts the request.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates for a request, the best first."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas] if candidate_replicas else []
        pending_request.routing_context.should_backoff = True
        loads = {replica.replica_id.unique_id: self._load(replica.replica_id) for replica in candidate_replicas}
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        key = pending_request.metadata.session_id
        if key:
            order = order_by_load(key, loads)
        else:
            order = sorted(random.sample(list(loads), len(loads)), key=lambda name: loads[name])
        return [[by_name[name]] for name in order]

    def _load(self, replica: ReplicaID) -> int:
        return self.replica_queue_len_cache.get(replica) or 0
