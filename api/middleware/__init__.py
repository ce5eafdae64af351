"""ASGI middleware. The outermost: paths, security headers, access log, host names, authentication, body limit."""
