"""What `outrider-edge serve` is made of, checked before anything listens."""

from __future__ import annotations

from dataclasses import dataclass

from edge_agent.config import EdgeSettings
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
    without_key: bool = False
    """Serve whoever can connect, under any name, where there is no key."""
    max_body_bytes: int = 8 << 20
    """Of a request."""
    max_choices: int = 32
    """Of a request, over all its prompts: half of what is served at once, so that others find a place, too."""
    stall_s: float = 60.0
    """A client that takes nothing of its stream for so many seconds has gone."""
    stop_s: float = 20.0
    """Seconds that requests under way have at the end."""

    @classmethod
    def of(cls, settings: EdgeSettings) -> ServeOptions:
        key = settings.serve_api_key
        return cls(
            listen=settings.serve_listen,
            api_key=key.get_secret_value() if key is not None else None,
            cors_origins=tuple(filter(None, map(str.strip, settings.serve_cors_origins.split(",")))),
            without_key=settings.serve_without_key,
            max_choices=max(1, settings.max_sessions // 2),
            stop_s=settings.serve_stop_s,
        )

    @property
    def hosts(self) -> frozenset[str] | None:
        """Names by which it may be asked; None: any.

        A page can have a name of its own point at loopback, where its browser then takes this server for the page's:
        without a key nothing else would keep it out.
        """
        if self.api_key is not None or self.without_key:
            return None
        return frozenset({"localhost", "127.0.0.1", "::1", split_address(self.listen)[0].lower()})

    def check(self) -> None:
        """Raises BadRequest for what would be unsafe or cannot be."""
        split_address(self.listen)
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise BadRequest("the server's API key must be a text of printable ASCII characters", field="api_key")
        if self.api_key is None and not self.without_key and not is_loopback(self.listen):
            raise BadRequest(
                f"listen is {self.listen}: others than this machine could use the cluster without a key; set "
                "OUTRIDER_EDGE_SERVE_API_KEY, or allow it with --serve-without-key",
                field="listen",
            )
