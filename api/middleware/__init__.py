"""ASGI middleware. The outermost comes first: security headers, access log, authentication, body limit."""
