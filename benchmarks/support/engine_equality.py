"""Send the same requests to verifiers of each engine, and compare the outputs within each engine and between engines.

An engine has two verifiers. A device with the shipped draft and one without any send each call, a prompt in one of
three settings, in four ways: with and without drafts, in one piece and resumed. A resumed request loses its connection
after some tokens, and the device attaches to the engine's other verifier. All requests of an engine run a few at once,
so that they join and leave each other's steps.

Outputs are compared token by token. Where two first differ, the reference scores both tokens after what came before:
closer than reference.TIE to the best one it is a tie, which rounding may decide, and else a mismatch. The gap of greedy
tokens is one of log-probabilities, that of sampled ones has the noise added and is divided by the temperature.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.support import old_harness as harness
from benchmarks.support.engine_options import TORCH, VLLM, Engines
from benchmarks.support.network_proxy import DelayProxy
from benchmarks.support.old_harness import Pair
from benchmarks.support.reference import TIE, Reference, ReferenceSampling
from edge_agent.config import EdgeSettings
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.sessions import Sessions
from edge_agent.session.coordinator_client import Placement
from edge_agent.session.failover import AttachTarget, NextAttach, Route, next_attach
from outrider.core.backoff import Backoff
from outrider.core.errors import OutriderError

SEED = 20_261_123
SETTINGS = {
    "greedy": ReferenceSampling(),
    "sampled": ReferenceSampling(temperature=0.8, top_p=0.95, seed=SEED),
    "penalised": ReferenceSampling(
        temperature=0.8, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, seed=SEED
    ),
}
CUT = (3, 12)
"""Least and most tokens that an attach brings before its connection is cut."""
ON_THE_WAY = 16
"""Most tokens that still arrive after it has been cut."""
AT_ONCE = 8


@dataclass(frozen=True)
class Way:
    """Describe how a call is sent: with drafts or without, and whether it is resumed."""

    drafted: bool
    resumed: bool


PLAIN = Way(drafted=False, resumed=False)
WAYS = (PLAIN, Way(True, False), Way(True, True), Way(False, True))


@dataclass(frozen=True)
class Call:
    """Hold a prompt and its setting. Calls are told apart by their number."""

    number: int
    prompt_id: str
    prompt: tuple[int, ...]
    setting: str
    grammar: str = ""
    max_tokens: int = 0
    """Length of the output at most; 0 for that of all calls."""

    @property
    def ignore_eos(self) -> bool:
        """Return whether the output has its full length; every other call's may end before it is resumed."""
        return self.number % 2 == 0 and not self.grammar

    def __str__(self) -> str:
        return f"{self.prompt_id}, {self.setting}"


@dataclass(frozen=True)
class Answer:
    """Hold an output, with the steps and attaches that it took."""

    tokens: tuple[int, ...]
    steps: int
    attaches: int
    drafted: bool

    def __str__(self) -> str:
        return f"{'drafted' if self.drafted else 'plain'}, {self.attaches} attaches"


def calls(prompts: Mapping[str, Sequence[int]], count: int) -> list[Call]:
    """Return so many calls, none twice until every prompt has come in every setting; the settings alternate."""
    ids, settings = list(prompts), list(SETTINGS)
    # With every round over the prompts the settings move on by one.
    chosen = [(ids[i % len(ids)], settings[(i % len(ids) + i // len(ids)) % len(settings)]) for i in range(count)]
    return [Call(i, name, tuple(prompts[name]), setting) for i, (name, setting) in enumerate(chosen)]


_addresses: ContextVar[tuple[str, ...]] = ContextVar("_addresses", default=())


class _GivenRoute:
    """Lead a session to the given verifiers, to the next one whenever an attach has ended early, and to the last again.

    As with the product's routes, an attach may end early by itself: gRPC loses the end of a stream on which the device
    is writing.
    """

    def __init__(self, addresses: Sequence[str], backoff: Backoff) -> None:
        self._addresses = addresses
        self._backoff = backoff
        self._epoch = 0

    async def next(self) -> AttachTarget:
        self._epoch += 1
        return AttachTarget(self._addresses[min(self._epoch, len(self._addresses)) - 1], self._epoch)

    def failed(self, error: OutriderError, *, progressed: bool) -> None:
        if next_attach(error) is NextAttach.NONE:
            raise error
        if progressed:
            self._backoff.progressed()
        self._backoff.failed(error)


class _GivenSessions(Sessions):
    def route(self, placement: Placement | None, budget_s: float) -> Route:
        addresses = _addresses.get()
        return _GivenRoute(addresses, Backoff(budget_s)) if addresses else super().route(placement, budget_s)


class _GivenClient(AsyncClient):
    """A client whose sessions go where the task that begins them says."""

    _sessions_type = _GivenSessions


class Devices:
    """Run a device with the target's draft, and one without any."""

    def __init__(self, drafting: AsyncClient, streaming: AsyncClient, max_tokens: int) -> None:
        self._clients = {True: drafting, False: streaming}
        self._max_tokens = max_tokens
        self._places = asyncio.Semaphore(AT_ONCE)

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, verifier: str, max_tokens: int) -> AsyncIterator[Devices]:
        """Load what devices need from this verifier; its engine does not matter, since the weights are the same."""
        settings = EdgeSettings(max_sessions=AT_ONCE, draft_workers=AT_ONCE)
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                _GivenClient(verifier=verifier, draft=draft, timeout=None, retries=0, settings=settings)
                for draft in ("auto", None)
            ]
            for client in clients:
                await (await stack.enter_async_context(client)).prepare()
            yield cls(clients[0], clients[1], max_tokens)

    async def send(self, call: Call, addresses: Sequence[str], *, drafted: bool) -> Answer:
        """Send a call to the first address, and lead it on to each of the others after some tokens.

        Raises RuntimeError if the session stayed where its connection was cut.
        """
        draw = random.Random(SEED + call.number)
        async with self._places, contextlib.AsyncExitStack() as stack:
            links = [await stack.enter_async_context(DelayProxy(address)) for address in addresses[:-1]]
            _addresses.set((*(link.address for link in links), addresses[-1]))
            options = {"ignore_eos": call.ignore_eos, **asdict(SETTINGS[call.setting]), "grammar": call.grammar}
            options["max_tokens"] = call.max_tokens or self._max_tokens
            stream = await self._clients[drafted].stream(call.prompt, **options)
            got, cut_at, attached_at, after = 0, list[int](), 0, draw.randint(*CUT)
            async with stream:
                async for chunk in stream:
                    if stream.statistics.attaches <= len(cut_at):
                        attached_at = got + len(chunk.token_ids)  # what was on the way when the connection was cut
                    got += len(chunk.token_ids)
                    if len(cut_at) < len(links) and got >= attached_at + after:
                        await links[len(cut_at)].__aexit__(None, None, None)  # nothing accepts there any more
                        cut_at.append(got)
                        after = draw.randint(*CUT)
        completion = stream.completion
        attaches = completion.statistics.attaches
        if attaches <= sum(got - at > ON_THE_WAY for at in cut_at):
            raise RuntimeError(f"{call}: {len(cut_at)} connections were cut, and it attached {attaches} times")
        return Answer(completion.token_ids, completion.statistics.steps, attaches, drafted)


@dataclass
class Comparison:
    """Count outputs that are equal, and those whose first difference is a tie or a mismatch."""

    reference: Reference
    name: str
    """What is compared, for the messages."""
    equal: int = 0
    ties: list[float] = field(default_factory=list)
    """The gap of each tie."""
    mismatches: int = 0

    def of(self, outputs: Iterable[tuple[Call, Answer, Answer]]) -> dict[str, Any]:
        """Compare two answers to each call; return the figures."""
        for call, expected, got in outputs:
            self.add(call, expected, got)
        gaps = [float(f"{gap:.3g}") for gap in self.ties]
        return {"equal": self.equal, "ties": gaps, "mismatches": self.mismatches}

    def add(self, call: Call, expected: Answer, got: Answer) -> None:
        """Compare two answers to one call."""
        first, second = expected.tokens, got.tokens
        if first == second:
            self.equal += 1
            return
        at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        gap = float("inf")  # one of them stopped early
        if at is not None:
            setting = SETTINGS[call.setting]
            gap = self.reference.gap(list(call.prompt), list(first[:at]), setting, (first[at], second[at]))
        tie = gap <= TIE
        kind = "tie" if tie else "MISMATCH"
        print(f"{kind}: {self.name}, {call}, {got}: first difference at token {at}, gap {gap:.2e}", flush=True)
        if tie:
            self.ties.append(gap)
        else:
            self.mismatches += 1


Answers = Mapping[tuple[int, Way], Answer]
"""What one engine's verifiers answered, by the call's number and the way."""


async def run(pair: Pair, engines: Engines, requests: int, max_tokens: int) -> dict[str, Any]:
    """Send so many requests to each engine, and compare the outputs; return the figures of the last line.

    With two engines, greedy calls are sent once more, from our engine to vLLM and back: `moved`.
    """
    asked = calls(pair.encode(harness.prompts("heldout")), requests // len(WAYS))
    greedy = [call for call in asked if call.setting == "greedy"]
    answers: dict[str, Answers] = {}
    moved: list[Answer] = []
    async with harness.cluster() as cluster:
        models = ("--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1")
        served: dict[str, list[str]] = {}
        for engine, flags in engines.items():
            both = await asyncio.gather(*(cluster.start_verifier(*models, *flags) for _ in range(2)))
            served[engine] = [verifier.address for verifier in both]
        async with Devices.start(served[TORCH][0], max_tokens) as devices:
            for engine, addresses in served.items():
                answers[engine] = await _answers(devices, asked, addresses)
            if VLLM in served:
                route = (served[TORCH][0], served[VLLM][0], served[TORCH][1])
                moved = await asyncio.gather(*(devices.send(call, route, drafted=True) for call in greedy))
    reference = Reference(str(pair.target))
    within = {engine: _within(engine, each, asked, reference) for engine, each in answers.items()}
    if VLLM not in answers:
        return {"engines": within, "between": None, "moved": None}
    between = {
        setting: Comparison(reference, "torch and vllm").of(
            (call, answers[TORCH][call.number, PLAIN], answers[VLLM][call.number, PLAIN])
            for call in asked
            if call.setting == setting
        )
        for setting in SETTINGS
    }
    back = Comparison(reference, "from torch to vllm and back").of(
        (call, answers[TORCH][call.number, PLAIN], one) for call, one in zip(greedy, moved, strict=True)
    )
    there = {"requests": len(moved), "attaches": sum(answer.attaches for answer in moved)}
    return {"engines": within, "between": between, "moved": there | back}


async def _answers(devices: Devices, asked: Sequence[Call], addresses: Sequence[str]) -> Answers:
    """Send every call in every way, in an order that mixes them. addresses: of one engine's two verifiers."""
    jobs = [(call, way) for call in asked for way in WAYS]
    random.Random(SEED).shuffle(jobs)

    async def one(call: Call, way: Way) -> Answer:
        first, second = addresses if call.number % 2 else reversed(addresses)
        return await devices.send(call, (first, second) if way.resumed else (first,), drafted=way.drafted)

    found = await asyncio.gather(*(one(*job) for job in jobs))
    return {(call.number, way): answer for (call, way), answer in zip(jobs, found, strict=True)}


def _within(engine: str, answers: Answers, asked: Sequence[Call], reference: Reference) -> dict[str, Any]:
    """Compare every call's outputs with its plain one; return the engine's figures."""
    drafted = [answer for (_, way), answer in answers.items() if way.drafted]
    compared = Comparison(reference, engine).of(
        (call, answers[call.number, PLAIN], answers[call.number, way]) for call in asked for way in WAYS[1:]
    )
    return {
        "requests": len(answers),
        "tokens": sum(len(answer.tokens) for answer in answers.values()),
        "resumed": sum(answer.attaches > 1 for answer in answers.values()),
        "tokens_per_step": round(sum(len(a.tokens) for a in drafted) / sum(a.steps for a in drafted), 3),
        **compared,
    }


def mismatches(found: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield what was compared and its mismatches."""
    for engine, one in found["engines"].items():
        yield f"requests whose output differs, {engine}", one["mismatches"]
    for setting, one in (found["between"] or {}).items():
        yield f"outputs that differ between the engines, {setting}, ties left out", one["mismatches"]
    if found["moved"]:
        yield "outputs that differ from torch to vllm and back, ties left out", found["moved"]["mismatches"]
