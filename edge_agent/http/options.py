"""What `outrider-edge serve` is made of, checked before anything listens."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import BadRequest
from outrider.wire.channels import is_loopback, split_address


@dataclass(frozen=True)
class ServeOptions:
    """Of one server."""

    listen: str = "127.0.0.1:8080"
    """HOST:PORT; port 0 takes a free one."""
    api_key: str | None = None
    """What clients must send as `Authorization: Bearer KEY`; None: nothing."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages browsers may let ask; "*" is any."""
    insecure: bool = False
    """Allow an address beyond loopback without a key."""
    max_body_bytes: int = 8 << 20
    """Of a request."""

    def check(self) -> None:
        """Raises BadRequest for what would be unsafe or cannot be."""
        split_address(self.listen)
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise BadRequest("the server's API key must be a text of printable ASCII characters", field="api_key")
        if self.api_key is None and not self.insecure and not is_loopback(self.listen):
            raise BadRequest(
                f"listen is {self.listen}: others than this machine could use the cluster without a key; set "
                "OUTRIDER_EDGE_SERVE_API_KEY, or allow it with --insecure",
                field="listen",
            )
