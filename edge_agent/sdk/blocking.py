"""The SDK for callers that block: `Client` is `AsyncClient` on an event loop in a thread of its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from edge_agent.config import EdgeSettings
from edge_agent.metrics import EdgeMetrics
from edge_agent.releases.updater import ReleaseUpdater
from edge_agent.sdk.blocking_stream import BlockingStream
from edge_agent.sdk.client import AsyncClient, Prompt
from edge_agent.sdk.loop_thread import LoopThread
from edge_agent.sdk.timeout import DEFAULT_TIMEOUT, Timeout
from edge_agent.sdk.types import DEFAULT_RETRIES, Completion, Offline, Options
from edge_agent.target.bundle import TargetKit
from edge_agent.target.chat_template import Message
from outrider.wire.channels import ClientTls


class Client:
    """As AsyncClient, whose arguments, methods, types and errors it has, for code that blocks. A context manager.

        from edge_agent import Client

        with Client(coordinator="127.0.0.1:7700") as client:
            print(client.generate("def add(a, b):", max_tokens=64).text)
            with client.stream("def add(a, b):", max_tokens=64) as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)

    Any number of threads may use one.
    Ctrl-C cancels the request that its thread waits for. A client that nobody closes is closed with the process.
    """

    def __init__(
        self,
        *,
        coordinator: str | None = None,
        verifier: str | None = None,
        target: str | None = None,
        draft: str | Path | None = "auto",
        api_key: str | None = None,
        tls: ClientTls | None = None,
        insecure: bool | None = None,
        cache_dir: str | Path | None = None,
        reroute: Mapping[str, str] | None = None,
        traffic_class: str = "",
        timeout: Timeout | float | None = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
        offline: Offline = "raise",
        settings: EdgeSettings | None = None,
    ) -> None:
        self._client = AsyncClient(
            coordinator=coordinator,
            verifier=verifier,
            target=target,
            draft=draft,
            api_key=api_key,
            tls=tls,
            insecure=insecure,
            cache_dir=cache_dir,
            reroute=reroute,
            traffic_class=traffic_class,
            timeout=timeout,
            retries=retries,
            offline=offline,
            settings=settings,
        )
        self._thread = LoopThread(self._client, "outrider-client")
        self._end = weakref.finalize(self, self._thread.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs, free the draft, close the connections.

        Requests that have a place end as cancelled; those that wait for one, and later ones, raise BadRequest.
        """
        self._end()

    @property
    def updates(self) -> ReleaseUpdater | None:
        """What keeps the draft up to date; None where nothing does."""
        return self._client.updates

    @property
    def metrics(self) -> EdgeMetrics:
        """What its requests counted, for Prometheus."""
        return self._client.metrics

    @property
    def ready(self) -> bool:
        """Whether what the target needs is loaded."""
        return self._client.ready

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole completion of a text or of token ids. `options` are those of Options."""
        return self._thread.run(self._client.generate(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> BlockingStream:
        """The completion in chunks, as the verifier commits them."""
        return BlockingStream(self._thread.run(self._client.stream(prompt, **options)), self._thread)

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """The assistant's answer to messages with `role` and `content`, in the target's own template."""
        return self._thread.run(self._client.chat(messages, **options))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> BlockingStream:
        """The assistant's answer in chunks. Raises ModelRefused for a target without a chat template."""
        return BlockingStream(self._thread.run(self._client.stream_chat(messages, **options)), self._thread)

    def prepare(self) -> TargetKit:
        """Fetch and load what the target needs, once; the first request does it otherwise.

        Its `drafts` are those in use now. Whoever leaves before it is done does not stop it: the next one finds it.
        """
        return self._thread.run(self._client.prepare())
