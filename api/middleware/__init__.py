"""ASGI middleware. The outermost comes first: security headers, access log, host names, authentication, body limit."""
