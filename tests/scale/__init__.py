"""Tests of several processes and machines: PostgreSQL, Redis Cluster, Ray. `make scale` runs them."""
