"""Check the options of `outrider-edge serve` before it listens."""

from __future__ import annotations

from dataclasses import dataclass

from edge_agent.config import EdgeSettings
from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest
from outrider.wire.channels import is_loopback


@dataclass(frozen=True)
class ServeOptions:
    """Configures one HTTP server, apart from its client."""

    listen: str = "127.0.0.1:8080"
    """HOST:PORT to listen at; port 0 takes a free one."""
    api_key: str | None = None
    """Key that clients must send as `Authorization: Bearer KEY`; None asks for none."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may send requests from a browser; "*" is any."""
    without_key: bool = False
    """Without a key, serve anybody who can connect, under any host name."""
    answer_format: str = "auto"
    """The form of tool calls and reasoning in the target's text, one of `TOOL_FORMATS`; "auto" tells it from the chat
    template, "none" takes all text as content."""
    max_body_bytes: int = 8 << 20
    """Largest body of a request, in bytes."""
    max_choices: int = 32
    """Most choices of a request, over all its prompts: half of all slots, so that others find one, too."""
    stall_s: float = 60.0
    """Seconds after which a client that takes nothing of its stream counts as gone."""
    stop_s: float = 20.0
    """Seconds that requests under way have to finish when the server stops."""

    @classmethod
    def of(cls, settings: EdgeSettings) -> ServeOptions:
        key = settings.serve_api_key
        return cls(
            listen=settings.serve_listen,
            api_key=key.get_secret_value() if key is not None else None,
            cors_origins=tuple(filter(None, map(str.strip, settings.serve_cors_origins.split(",")))),
            without_key=settings.serve_without_key,
            answer_format=settings.serve_answer_format,
            max_choices=max(1, settings.max_sessions // 2),
            stop_s=settings.serve_stop_s,
        )

    @property
    def hosts(self) -> frozenset[str] | None:
        """Return the host names that requests may use; None is any.

        A web page can point a name of its own at loopback, and its browser then takes this server for the page's own:
        without a key nothing else would keep the page out.
        """
        if self.api_key is not None or self.without_key:
            return None
        return frozenset({"localhost", "127.0.0.1", "::1", split_address(self.listen)[0].lower()})

    def check(self) -> None:
        """Raise BadRequest for options that are unsafe or impossible."""
        split_address(self.listen)
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise BadRequest("the server's API key must be a text of printable ASCII characters", field="api_key")
        if self.api_key is None and not self.without_key and not is_loopback(self.listen):
            raise BadRequest(
                f"listen is {self.listen}: others than this machine could use the cluster without a key; set "
                "OUTRIDER_EDGE_SERVE_API_KEY, or allow it with --serve-without-key",
                field="listen",
            )
