#!/bin/sh
# Join Redis servers to a cluster of primaries: NODES="host:port host:port …", three at least. REDISCLI_AUTH is their password,
# if they have one. Nodes that are joined already are told each other's present addresses, so it may run at any time: after
# a restart of all of them at once they have new addresses, and would not find each other.
set -eu

addresses=""
for node in $NODES; do
  address=$(getent hosts "${node%:*}" | awk 'NR == 1 {print $1}')
  [ -n "$address" ] || { echo "there is no host ${node%:*}" >&2; exit 1; }
  addresses="$addresses $address:${node##*:}"
done

first=${NODES%% *}
if redis-cli -h "${first%:*}" -p "${first##*:}" cluster info | grep -q '^cluster_slots_assigned:16384'; then
  for address in $addresses; do
    redis-cli -h "${first%:*}" -p "${first##*:}" cluster meet "${address%:*}" "${address##*:}" >/dev/null
  done
  echo "the nodes are joined"
  exit 0
fi
# shellcheck disable=SC2086  # one word for each node
redis-cli --cluster create $addresses --cluster-yes
