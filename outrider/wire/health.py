"""Answer gRPC's health checks without reading them, so that a caller can hold neither memory nor a place."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2


class Health:
    """Tells whether the server takes work. Only `Check` is served, and its answer is for the whole server, whatever
    service the request names. A server begins unhealthy."""

    def __init__(self) -> None:
        self.serving = False

    def add_to(self, server: grpc.aio.Server) -> None:
        """Have a server answer health checks by this."""
        check: Any = grpc.stream_unary_rpc_method_handler(
            self._check, response_serializer=health_pb2.HealthCheckResponse.SerializeToString
        )
        server.add_registered_method_handlers(health.SERVICE_NAME, {"Check": check})

    async def _check(self, unread: object, context: object) -> health_pb2.HealthCheckResponse:
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if self.serving else status.NOT_SERVING)
