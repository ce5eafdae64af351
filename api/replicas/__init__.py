"""Several replicas of the service, run by Ray Serve. Only `ragkv serve --replicas` and a Ray cluster import this."""
