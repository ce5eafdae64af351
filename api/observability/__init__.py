"""What operators see of the service: logs, metrics, readiness and traces."""
