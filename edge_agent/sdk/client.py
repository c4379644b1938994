"""Serve code that awaits: `AsyncClient` turns a prompt into the target's text."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

from pydantic import SecretStr

from edge_agent.config import SYSTEM_CA, EdgeSettings
from edge_agent.drafting.pool import DraftPool
from edge_agent.releases.follower import Follower
from edge_agent.releases.state import FOLDER
from edge_agent.sdk.generation import CompletionStream, Deadline, ItemStream
from edge_agent.sdk.request import Request, check_messages, check_prompt, check_variables
from edge_agent.sdk.sessions import Sessions
from edge_agent.sdk.skeleton import SkeletonStream, begun
from edge_agent.sdk.types import (
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT,
    Completion,
    Offline,
    Options,
    Prompt,
    Skeleton,
    Timeout,
)
from edge_agent.target.artifacts import Fetch, keep, recall
from edge_agent.target.bundle import AUTO, NO_DRAFT, BundleLoader, TargetBundle
from edge_agent.target.chat_template import Message
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest, ModelRefused, Unavailable
from outrider.settings import from_environment
from outrider.wire.channels import ClientTls
from outrider.wire.manifest import trusted_keys
from outrider.wire.v1 import session_pb2 as pb


class AsyncClient:
    """A client of one cluster or of one verifier, for code that awaits. It is an async context manager.

        import asyncio

        from outrider import AsyncClient


        async def main() -> None:
            async with AsyncClient(coordinator="127.0.0.1:7700") as client:
                completion = await client.generate("def add(a, b):", max_tokens=64)
                print(completion.text)
                async with await client.stream("def add(a, b):", max_tokens=64) as stream:
                    async for chunk in stream:
                        print(chunk.text, end="", flush=True)


        asyncio.run(main())

    Every error is an OutriderError. The draft is loaded once and shared by the client's sessions.

    coordinator, verifier: "host:port" of a cluster, or of one verifier instead.
    target: the target's name, where the cluster serves several.
    draft: "auto" takes that of `settings`, by default the one that the target's verifiers offer or, where `settings`
    name publishers to trust, the latest that these have signed, with n-grams until there is one; "ngram" proposes
    tokens from the text alone; None or "none" drafts nothing; anything else is the path of a GGUF file, or several
    paths, the best draft first, of drafts that propose tokens together.
    api_key: the tenant's key, for a coordinator that asks for one.
    tls: speak TLS, trusting these authorities, with a certificate where the cluster asks for one; None is plain text.
    insecure: allow plain text beyond loopback.
    cache_dir: the folder for tokenizers and drafts.
    reroute: a verifier's address -> the one to dial instead, for tunnels and proxies.
    settings: everything without an argument; None takes the environment's.

    The following hold for every request that does not set them itself:

    traffic_class: a label of your own, such as "code": a new session starts from what verifiers have measured of the
    same draft and class.
    timeout: seconds in all, or a Timeout, which also limits the time until the first token; after it TimedOut is
    raised. None is no limit.
    retries: how often a request that fails before its first token begins again. A later failure loses nothing: the
    session resumes on another verifier.
    offline: "draft_only" lets the draft model write alone while no verifier can be reached; each such chunk and the
    completion then have `verified=False`. An answer that a verifier has begun waits 20 s for one first. "raise" waits
    as long as `timeout` allows, or raises Unavailable.
    """

    def __init__(
        self,
        *,
        coordinator: str | None = None,
        verifier: str | None = None,
        target: str | None = None,
        draft: str | Path | Sequence[str | Path] | None = "auto",
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
        settings = settings or from_environment(EdgeSettings)
        coordinator, verifier = _addresses(settings, coordinator, verifier)
        given = {
            "target": target,
            "api_key": _checked_key(settings, api_key),
            "insecure": insecure,
            "cache_dir": cache_dir or None,
        }
        given = {name: value for name, value in given.items() if value is not None}
        settings = settings.model_copy(update={**given, "coordinator": coordinator, "verifier": verifier})
        self._defaults = Options(traffic_class=traffic_class, timeout=timeout, retries=retries, offline=offline)
        Request.of(**self._defaults)
        if tls is None and (settings.tls_ca or settings.tls_cert):
            authorities = None if settings.tls_ca == SYSTEM_CA else settings.tls_ca
            tls = ClientTls(authorities, settings.tls_cert, settings.tls_key)
        cache = Path(settings.cache_dir)
        if draft == AUTO:
            draft = settings.draft.split(",") if "," in settings.draft else settings.draft
        self._draft = None if draft in ("", NO_DRAFT) else draft
        self._settings = settings
        self._artifacts = ArtifactStore(cache / "artifacts")
        name = hashlib.sha256(f"{coordinator or verifier}\n{settings.target}".encode()).hexdigest()[:32]
        self._description_file = cache / "targets" / f"{name}.pb"
        """Keeps the target's description, for offline generation."""
        self._drafts = DraftPool(settings.draft_workers)
        self._sessions = Sessions(settings, self._drafts, tls, reroute)
        self.metrics = self._sessions.metrics
        self.updates: Follower | None = None
        """Keeps the draft up to date; None without trusted publishers or a coordinator, or for a draft chosen here."""
        keys = trusted_keys(settings.release_keys)
        if keys and coordinator and draft == AUTO:
            ask = self._sessions.coordinator.release_offer
            self.updates = self._sessions.updates = Follower(keys, cache / FOLDER, ask, self._drafts, tls)
        self._loading: asyncio.Task[TargetBundle] | None = None
        self._bundle: TargetBundle | None = None
        """Everything for the target, once it is loaded."""
        self._streams: weakref.WeakSet[ItemStream[Any]] = weakref.WeakSet()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel all requests, free the draft and close the connections.

        Requests that hold a slot end as cancelled; those that wait for one, and later ones, raise BadRequest.
        """
        await self._sessions.close(stream.aclose() for stream in self._streams)
        self._bundle = None

    # --- requests

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Return the whole completion of a text or of token ids; Options explains the keyword arguments."""
        return await (await self.stream(prompt, **options)).drain()

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> CompletionStream:
        """Return the completion in chunks, as the verifier commits them."""
        given = check_prompt(prompt)
        if isinstance(given, str):
            return await self._started(options, lambda bundle: bundle.encode_prompt(given))
        return await self._started(options, given)

    async def chat(
        self, messages: Sequence[Message], template: Mapping[str, Any] | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Return the assistant's answer to messages with `role` and `content`, in the target's own template.

        template: further variables of the template, such as `tools` or `enable_thinking`.
        """
        return await (await self.stream_chat(messages, template, **options)).drain()

    async def stream_chat(
        self, messages: Sequence[Message], template: Mapping[str, Any] | None = None, **options: Unpack[Options]
    ) -> CompletionStream:
        """Return the assistant's answer in chunks. Raises ModelRefused for a target without a chat template."""
        given, variables = check_messages(messages), check_variables(template)
        return await self._started(options, lambda bundle: bundle.encode_chat(given, variables))

    async def skeleton(
        self,
        messages: Sequence[Message],
        template: Mapping[str, Any] | None = None,
        *,
        points: int = 8,
        parallel: int = 4,
        **options: Unpack[Options],
    ) -> Skeleton:
        """Return an answer that is written as an outline, with its points then expanded side by side.

        This changes the answer: see `changes_answer` of Skeleton. Use `chat` for the target's own answer.
        It is skeleton-of-thought (arXiv 2307.15337): long answers come sooner, because a verifier's steps serve several
        points at once, and a prefix cache computes the beginning that their prompts share only once. The last message
        must be the user's.
        points: most points of the outline, 1 to 32. parallel: most points that are written at the same time, 1 to 32.
        options: hold for each point, `max_tokens` too; `timeout` is for all together. `grammar` and `prompt_logprobs`
        are refused.
        Raises the error of the first point that fails; `stream_skeleton` continues without it.
        """
        stream = await self.stream_skeleton(messages, template, points=points, parallel=parallel, **options)
        return await stream.drain()

    async def stream_skeleton(
        self,
        messages: Sequence[Message],
        template: Mapping[str, Any] | None = None,
        *,
        points: int = 8,
        parallel: int = 4,
        **options: Unpack[Options],
    ) -> SkeletonStream:
        """Return the points of `skeleton` as they finish. Raises ModelRefused for a target without a chat template."""
        given, variables = check_messages(messages), check_variables(template)

        def begin(turns: Sequence[Message], chosen: Options, left: Deadline) -> Awaitable[CompletionStream]:
            return self._started(chosen, lambda bundle: bundle.encode_chat(turns, variables), left)

        stream = await begun(begin, given, {**self._defaults, **options}, points, parallel)
        self._streams.add(stream)
        return stream

    async def _started(
        self,
        options: Options,
        prompt: Sequence[int] | Callable[[TargetBundle], Sequence[int]],
        deadline: Deadline | None = None,
    ) -> CompletionStream:
        """Start a request. prompt: its token ids, or returns them. deadline: of the work that it is a part of."""
        merged: Options = {**self._defaults, **options}
        request = Request.of(**merged)
        deadline = deadline or Deadline(request.timeout)
        bundle = await self._bundle_for(request, deadline)
        if request.grammar:
            await asyncio.to_thread(bundle.check_grammar, request.grammar)
        ids = await asyncio.to_thread(prompt, bundle) if callable(prompt) else prompt
        stream = CompletionStream(self._sessions, bundle, request, ids, deadline)
        self._streams.add(stream)
        return stream

    # --- the target

    async def prepare(self) -> TargetBundle:
        """Fetch and load what the target needs, once; otherwise the first request does it.

        `draft` of the result is the one in use now. A client whose `offline` is "draft_only" loads all this from the
        device's caches while no verifier can be reached. A caller that is cancelled does not stop the loading.
        """
        return await self._prepared(self._defaults["offline"])

    async def probe(self) -> None:
        """Ask the coordinator for a place, and its verifier for the target, without waiting or trying for long.

        Raises what a request would raise now: Unavailable if either cannot be reached, Overloaded for a full cluster.
        """
        self._sessions.check_open()
        async with self._sessions.artifacts(patient=False) as source:
            await source.describe()

    @property
    def ready(self) -> bool:
        """Return whether what the target needs is loaded."""
        return self._bundle is not None

    @property
    def writes_offline(self) -> bool:
        """Return whether the draft model answers requests alone while no verifier can be reached."""
        draft = self._drafts.draft
        return self._defaults["offline"] == "draft_only" and draft is not None and draft.has_model

    async def _bundle_for(self, request: Request, deadline: Deadline) -> TargetBundle:
        async with deadline.enforced(first_token=True):
            return await self._prepared(request.offline)

    async def _prepared(self, offline: Offline) -> TargetBundle:
        """Load the target, from this device's caches where that is allowed and no verifier can be reached."""
        try:
            return await self._loaded(self._load_from_verifiers)
        except Unavailable as error:
            why = error
            known = recall(self._description_file) if offline == "draft_only" else None
            if known is None:
                raise

        async def unreachable(content_hash: str, offset: int) -> AsyncGenerator[bytes, None]:
            for chunk in tuple[bytes, ...]():  # none, but it makes this a generator
                yield chunk
            raise why

        return await self._loaded(lambda: self._load(known, unreachable))

    async def _loaded(self, load: Callable[[], Coroutine[Any, Any, TargetBundle]]) -> TargetBundle:
        """Return the bundle; starts `load` unless it is there or loading is under way. Raises what loading raises."""
        self._sessions.check_open()
        bundle = self._bundle
        if bundle is None:
            if self._loading is None or self._loading.done():
                self._loading = self._sessions.begin(self._load_and_install(load))
            bundle = await self._sessions.result_of(self._loading)
        return dataclasses.replace(bundle, draft=self._drafts.draft)

    async def _load_and_install(self, load: Callable[[], Coroutine[Any, Any, TargetBundle]]) -> TargetBundle:
        bundle = await load()
        self._drafts.replace(bundle.draft)
        if bundle.draft is not None:
            with contextlib.suppress(ModelRefused):  # each session is told of it
                await self._drafts.start(bundle.draft)
        self._bundle = bundle
        if self.updates is not None:
            self.updates.run()
        return bundle

    async def _load_from_verifiers(self) -> TargetBundle:
        async with self._sessions.artifacts() as source:
            bundle = await self._load(await source.describe(), source.fetch)
        keep(bundle.description, self._description_file)
        return bundle

    async def _load(self, description: pb.DescribeResponse, fetch: Fetch) -> TargetBundle:
        loader = BundleLoader(description, fetch, self._artifacts, self._settings)
        return await loader.load(self._draft, self.updates.begin if self.updates is not None else None)


def _addresses(settings: EdgeSettings, coordinator: str | None, verifier: str | None) -> tuple[str, str]:
    """Return the addresses of coordinator and verifier, one of them empty. Raises BadRequest for none or both."""
    if coordinator is None and verifier is None:
        coordinator, verifier = settings.coordinator, settings.verifier
    # An address given as an argument stands for itself: the environment's other one would contradict it.
    if bool(coordinator) == bool(verifier):
        got = f"both, {coordinator} and {verifier}" if coordinator else "neither"
        raise BadRequest(
            f"give either coordinator or verifier, as HOST:PORT; got {got} (--coordinator or --verifier of a command,"
            " OUTRIDER_EDGE_COORDINATOR or OUTRIDER_EDGE_VERIFIER in the environment)",
            field="coordinator",
        )
    return coordinator or "", verifier or ""


def _checked_key(settings: EdgeSettings, given: str | None) -> SecretStr | None:
    """Return the API key. Raises BadRequest, which does not show it, for one that no header can carry."""
    key = settings.api_key if given is None else SecretStr(given)
    value: object = "" if key is None else key.get_secret_value()
    if isinstance(value, str) and value.isascii() and value.isprintable():
        return key
    raise BadRequest("api_key must be a text of printable ASCII characters alone", field="api_key")
