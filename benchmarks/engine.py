"""The engine by itself on one core: time of a step, what a step spends outside the model, and peers on the same target.

The real EngineLoop reads requests from a real socket pair and writes events to it; the devices at the other end speak
between two turns of the loop, so their time is in no figure. Time is the one thread's own: what else runs on the core
is not in it. The trees agree with the target's continuation, generated first, with probability RATE at each depth.
Where two tokens of the target tie up to rounding, another batch may take the other one; that device's continuation is
then of no use, and more nodes were planned than accepted.

Nodes are weighed by worth and cost as in service, and then taken as the figure says, whatever they are worth.

Steps: ms of a whole turn, decoding an Append per session and encoding its Commit included, prefixes of about 256
tokens, greedy. Outside: the share of that turn outside TargetModel.forward, half of the sessions sampling and one of
them with penalties; the attention's index tensors and masks count as outside wherever they are built.

Peers: 16 greedy requests that come at once, without trees. The prompts' reading is in both sides' time (nothing of them
is cached before), EOS is ignored on both, weights are float32 on both. Hugging Face pads a ragged batch on the left and
generates to the longest output; tokens beyond what a request asked for do not count. `decode` is the same runs between
the last request's first token and the first request's last one, so without prompts. Assisted generation has one request
and the same draft, dequantised to float32; it stands beside our single session without any device.
"""

from __future__ import annotations

import contextlib
import cProfile
import os
import pstats
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks import harness, peers
from benchmarks.exact import texts
from benchmarks.harness import Pair, spread
from benchmarks.peers import HuggingFace, Request, Timed
from benchmarks.trees import Device, Tally
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.model import TargetModel
from cloud_verifier.engine.ordering import Cost, Shares, Worth, by_worth, evenly
from cloud_verifier.engine.selftest import self_test
from cloud_verifier.engine_loop import EngineLoop
from cloud_verifier.ipc import EngineEnd, frame
from outrider.core.processors import SamplingParams
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Commit, Directive, Finish, SessionLimits
from outrider.wire import codecs
from outrider.wire.v1 import engine_pb2 as pb

T = TypeVar("T")

SESSIONS = (1, 4, 16)
NODES = (0, 1, 4, 8, 16)
PROMPT = 232
"""Tokens; what a timed session generates takes its prefix to about 256 in the middle."""
LONGEST = 512
"""Tokens of the longest prompt."""
RATE = 0.8
TOKENS_PER_STEP = 12
"""Generated first by plain steps for every step that is timed: the longest path of a tree and one more."""
WARM = 2
"""Steps after the prompts that are not timed."""
SHARED_NODES = 8
"""Nodes per session of the last line's `overhead_share_b16`."""
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
PENALISED = replace(SAMPLED, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
LIMITS = SessionLimits()
SEAMS = {
    "_decide": "schedule",
    "append": "protocol",
    "_prepare": "prepare",
    "_advance": "pack",
    "_walk": "walk",
    "_commit": "commit",
}
"""The Engine's method that does it -> part of a step."""
PLAN = "attention plan"


class Parts:
    """Seconds of one thread by part. A part within another is taken out of it, so that the parts sum to the whole."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    def enter(self, name: str) -> None:
        self._book()
        self._stack.append(name)

    def leave(self) -> None:
        self._book()
        self._stack.pop()

    def _book(self) -> None:
        now = self._clock()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """What was booked since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def timed(self, name: str, function: Callable[..., T]) -> Callable[..., T]:
        def call(*args: Any, **kwargs: Any) -> T:
            self.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return call


@dataclass(frozen=True)
class Turn:
    """One turn of the engine's loop."""

    parts: Mapping[str, float]
    """Seconds."""
    commits: tuple[Commit, ...]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def outside(self) -> float:
        """The share of the time that is not the model's forward."""
        return 1.0 - self.parts.get("forward", 0.0) / self.seconds


class TimedEnd(EngineEnd):
    """The engine's end of the socket. A turn of the loop ends with `send`; then `between` has its say, untimed."""

    def __init__(self, sock: socket.socket, parts: Parts, between: Callable[[list[pb.EngineEvent]], None]) -> None:
        super().__init__(sock)
        self._parts = parts
        self._between = between

    def receive(self, timeout_s: float | None) -> Iterator[pb.EngineRequest]:
        following = self._parts.timed("decode", partial(next, super().receive(timeout_s), None))
        while (request := following()) is not None:
            yield request

    def send(self, events: list[pb.EngineEvent]) -> None:
        self._parts.timed("encode", super().send)(events)
        self._parts.leave()
        self._between(events)
        self._parts.enter("loop")


def priced_but_even(worths: Sequence[Worth], rows: int, cost: Cost) -> Shares:
    """Work out what a step in service would, by worth and cost; then take exactly the nodes that are to be timed."""
    by_worth(worths, rows, cost)
    return evenly(worths, rows, cost)


class Bench:
    """An engine whose parts are timed, and the loop that serves devices with it."""

    def __init__(self, model: TargetModel, config: EngineConfig | None = None, parts: Parts | None = None) -> None:
        self.model = model
        self.engine = Engine(model, config)
        self.engine.ordering = priced_but_even
        self.parts = parts or Parts()
        self._visits = 0
        for method in SEAMS:
            if not hasattr(self.engine, method):
                print(f"the engine has no {method}: `{SEAMS[method]}` is not told apart")

    def serve(
        self,
        devices: Sequence[Device],
        *,
        nodes: int = 0,
        enough: Callable[[Sequence[Turn]], bool] = lambda turns: False,
        salt: str = "",
    ) -> list[Turn]:
        """All turns until every device is through, or there are enough. Raises RuntimeError where a session fails.

        nodes: that a step takes of a session. salt: requests of another one find nothing of theirs in the prefix cache.
        """
        self._visits += 1
        with contextlib.ExitStack() as stack:
            front, back = (stack.enter_context(sock) for sock in socket.socketpair())
            visit = _Visit(f"visit {self._visits}", devices, front, self.parts, enough)
            visit.start(Directive(nodes_per_step=max(1, nodes)), salt)
            loop = EngineLoop(self.engine, TimedEnd(back, self.parts, visit.between), self.model.vocab_size)
            for seam in self._seams(loop):
                stack.enter_context(seam)
            self.parts.take()
            self.parts.enter("loop")
            loop.run()
            self.parts.leave()
        return visit.turns

    def _seams(self, loop: EngineLoop) -> Iterator[Any]:
        """Patches that time the parts."""
        timed = self.parts.timed
        yield patch.object(codecs, "append_from_proto", timed("decode", codecs.append_from_proto))
        yield patch.object(loop, "_event", timed("encode", loop._event))
        yield patch.object(self.model, "forward", timed("forward", self.model.forward))
        yield patch.object(self.model.attention, "plan", timed(PLAN, self._planned(self.model.attention.plan)))
        for method, part in SEAMS.items():
            if hasattr(self.engine, method):
                yield patch.object(self.engine, method, timed(part, getattr(self.engine, method)))

    def _planned(self, plan: Callable[..., Any]) -> Callable[..., Any]:
        """`plan`, with the indices and masks that sdpa builds once its first layer asks for them timed as its part."""

        def planned(*args: Any) -> Any:
            made = plan(*args)
            if hasattr(made, "_layout"):
                made._layout = self.parts.timed(PLAN, made._layout)
            return made

        return planned


class _Visit:
    """The other end of the socket: devices by name, heard and asked between the turns."""

    def __init__(
        self,
        label: str,
        devices: Sequence[Device],
        front: socket.socket,
        parts: Parts,
        enough: Callable[[Sequence[Turn]], bool],
    ) -> None:
        self.turns: list[Turn] = []
        self._devices = {f"{label}, session {i}": device for i, device in enumerate(devices)}
        self._front = front
        self._parts = parts
        self._enough = enough
        self._over = False

    def start(self, directive: Directive, salt: str) -> None:
        for name, device in self._devices.items():
            start = pb.Start(
                attach=codecs.attach_to_proto(device.session.attach(1, LIMITS)),
                limits=codecs.limits_to_proto(LIMITS),
                directive=codecs.directive_to_proto(directive),
                salt=salt,
            )
            self._request(name, start=start)
        self._speak()

    def between(self, events: list[pb.EngineEvent]) -> None:
        """One turn is over: book it, pass on what came of it, and send what the next one will read."""
        taken = self._parts.take()
        if self._over:
            return
        if events:
            self._front.recv(1 << 20)  # the same is at hand as messages
        commits = []
        for event in events:
            if event.HasField("failure"):
                raise RuntimeError(f"{event.session_id or 'the engine'} failed: {event.failure.message}")
            if event.HasField("commit"):
                commits.append(codecs.commit_from_proto(event.commit))
                self._devices[event.session_id].hear(commits[-1])
        self.turns.append(Turn(taken, tuple(commits)))
        self._speak()

    def _speak(self) -> None:
        live = {name: device for name, device in self._devices.items() if not device.session.finished}
        self._over = not live or self._enough(self.turns)
        for name, device in live.items():
            if not self._over and (append := device.say()) is not None:
                self._request(name, append=codecs.append_to_proto(append))
        if self._over:
            for name in self._devices:
                self._request(name, stop=pb.Stop())
            self._request("", quit=pb.Quit())

    def _request(self, name: str, **kind: Any) -> None:
        self._front.sendall(frame(pb.EngineRequest(session_id=name, epoch=1, **kind)))


@dataclass(frozen=True)
class Case:
    """A session to be timed."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    truth: tuple[int, ...] = ()
    """What the target says after the prompt."""

    def device(self, max_tokens: int, nodes: int = 0, rate: float = 0.0, vocabulary: int = 0, seed: int = 0) -> Device:
        session = DeviceSession(self.prompt, sampling=self.sampling, max_tokens=max_tokens, ignore_eos=True)
        return Device(session, self.truth, nodes, rate, vocabulary, Random(seed))


def continued(bench: Bench, cases: Sequence[Case], tokens: int) -> list[Case]:
    """The cases with their truth, generated by plain steps."""
    devices = [case.device(tokens) for case in cases]
    bench.serve(devices)
    return [replace(c, truth=tuple(d.session.received)) for c, d in zip(cases, devices, strict=True)]


def steps(
    bench: Bench, cases: Sequence[Case], nodes: int, count: int, seed: int, tally: Tally, rate: float = RATE
) -> list[Turn]:
    """So many turns in each of which every session has its plain row and `nodes` nodes."""
    room = len(cases[0].truth) + LIMITS.depth
    devices = [case.device(room, nodes, rate, bench.model.vocab_size, 1_000 * seed + i) for i, case in enumerate(cases)]

    def full(turns: Sequence[Turn]) -> list[Turn]:
        return [t for t in turns if len(t.commits) == len(cases) and all(c.evaluated == nodes for c in t.commits)]

    found = full(bench.serve(devices, nodes=nodes, enough=lambda turns: len(full(turns)) >= WARM + count))
    if len(found) < WARM + count:
        raise RuntimeError(f"{len(found)} steps of {len(cases)} sessions with {nodes} nodes, must be {WARM + count}")
    for device in devices:
        tally.add(device.tally)
    return found[WARM:]


def autoregression(bench: Bench, requests: Sequence[Request], salt: str) -> Timed:
    """All requests at once, without trees."""
    devices = [Case(request.prompt).device(request.tokens) for request in requests]
    turns = bench.serve(devices, salt=salt)
    began = sum(c.start == 0 for t in turns for c in t.commits)
    waiting, decoding = began, []
    for turn in turns:
        if waiting == 0:
            decoding.append(turn)
        waiting -= sum(c.start == 0 for c in turn.commits)
        if any(c.finish is not Finish.NONE for c in turn.commits):
            break
    return Timed(
        outputs=tuple(tuple(device.session.received) for device in devices),
        seconds=sum(turn.seconds for turn in turns),
        decode_tokens=sum(len(c.tokens) for t in decoding for c in t.commits),
        decode_seconds=sum(turn.seconds for turn in decoding),
    )


Steps = dict[tuple[int, int], list[list[Turn]]]
"""(sessions, nodes) -> turns of each round"""


def ms(rounds: Sequence[Sequence[Turn]]) -> list[float]:
    """Median turn of each round."""
    return [1e3 * statistics.median(turn.seconds for turn in turns) for turns in rounds]


def outside(rounds: Sequence[Sequence[Turn]]) -> list[float]:
    """Median share of each round."""
    return [statistics.median(turn.outside for turn in turns) for turns in rounds]


def interleaved(
    bench: Bench, cases: Sequence[Case], arms: Sequence[tuple[int, int]], rounds: int, count: int, tally: Tally
) -> Steps:
    """Every arm once a round, from another one on each time."""
    found: Steps = {arm: [] for arm in arms}
    for number in range(rounds):
        turn = number % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            sessions, nodes = arm
            found[arm].append(steps(bench, cases[:sessions], nodes, count, number, tally))
    return found


def tell_steps(found: Steps) -> None:
    print("\nms per step, greedy: sessions down, nodes per session beside the plain row across")
    print("      " + "".join(f"{nodes:<26}" for nodes in NODES))
    for sessions in SESSIONS:
        print(f"{sessions:>4}  " + "".join(f"{spread(ms(found[sessions, nodes])):<26}" for nodes in NODES), flush=True)


def tell_outside(found: Steps) -> None:
    print("\nshare of a step outside the forward, half the sessions sampling; parts in ms")
    for (sessions, nodes), rounds in found.items():
        turns = [turn for turns in rounds for turn in turns]
        names = sorted({name for turn in turns for name in turn.parts})
        parts = {name: 1e3 * statistics.fmean(turn.parts.get(name, 0.0) for turn in turns) for name in names}
        print(f"  {sessions} sessions x {nodes} nodes: {spread(outside(rounds))} of {spread(ms(rounds))} ms")
        print("    " + ", ".join(f"{name} {parts[name]:.3f}" for name in sorted(parts, key=lambda n: -parts[n])))
    print(flush=True)


class Profiled(Parts):
    """Has a profile run where the time goes to the engine, but not to the model's forward."""

    def __init__(self, profile: cProfile.Profile) -> None:
        super().__init__()
        self._profile = profile

    def _book(self) -> None:
        super()._book()
        self._profile.disable()

    def _resume(self) -> None:
        if self._stack and self._stack[-1] != "forward":
            self._profile.enable()

    def enter(self, name: str) -> None:
        super().enter(name)
        self._resume()

    def leave(self) -> None:
        super().leave()
        self._resume()


def profiled(model: TargetModel, cases: Sequence[Case], count: int) -> None:
    """Which functions the time outside the forward goes to."""
    profile = cProfile.Profile()
    bench = Bench(model, parts=Profiled(profile))
    for number in range(4):
        steps(bench, cases, SHARED_NODES, count, number, Tally())
    for order in ("tottime", "cumtime"):
        pstats.Stats(profile).sort_stats(order).print_stats(30)


def cases(bench: Bench, ids: Sequence[Sequence[int]], tokens: int) -> tuple[list[Case], list[Case]]:
    """Sessions with known continuations: greedy ones, and the same with the first half sampling, one with penalties."""
    greedy = continued(bench, [Case(tuple(text[:PROMPT])) for text in ids], tokens)
    half = len(greedy) // 2
    params = [PENALISED, *[SAMPLED] * (half - 1)]
    sampled = [
        replace(case, sampling=replace(p, seed=i)) for i, (case, p) in enumerate(zip(greedy, params, strict=False))
    ]
    return greedy, continued(bench, sampled, tokens) + greedy[half:]


def main() -> None:
    disable_progress_bar()
    set_verbosity_error()
    parser = harness.arguments("engine", __doc__)
    parser.add_argument("--profile", action="store_true", help="only tell which functions a step's time goes to")
    options = parser.parse_args()
    pair = Pair.in_folder(options.models)
    harness.pin(min(os.sched_getaffinity(0)))
    model = TargetModel.load(pair.target, dtype="float32", threads=1)
    self_test(model)
    bench = Bench(model)
    ids = texts(pair.target, max(SESSIONS) * LONGEST, LONGEST)
    rounds, count, peer_rounds, output = (2, 3, 1, 40) if options.quick else (7, 8, 4, 128)
    greedy, mixed = cases(bench, ids, TOKENS_PER_STEP * (WARM + count))
    if options.profile:
        profiled(model, mixed, WARM + count)
        return
    tally = Tally()
    found = interleaved(bench, greedy, [(s, n) for s in SESSIONS for n in NODES], rounds, count, tally)
    tell_steps(found)
    shared = interleaved(bench, mixed, [(max(SESSIONS), n) for n in NODES if n != 1], rounds, count, tally)
    tell_outside(shared)
    print(f"trees: {tally.rate:.3f} of the tries accepted, {RATE} asked for; {tally.accepted} of {tally.planned} nodes")
    tree8 = [b / a for a, b in zip(ms(found[1, 0]), ms(found[1, 8]), strict=True)]
    print(f"one session, 8 nodes over none: {spread(tree8)}")
    hf = HuggingFace.load(pair.target, pair.draft)
    answers = peers.compared(partial(autoregression, bench), hf, ids, (PROMPT, output), peer_rounds)
    shares = {str(nodes): round(statistics.median(outside(turns)), 4) for (_, nodes), turns in shared.items()}
    harness.finish(
        {
            "ar_b16_vs_best_hf": peers.over_best(answers["equal"]),
            "ar_ragged_vs_best_hf": peers.over_best(answers["ragged"]),
            "overhead_share_b16": shares[str(SHARED_NODES)],
            "tree8_over_single_b1": round(statistics.median(tree8), 3),
            "overhead_share_b16_by_nodes": shares,
            "step_ms": {f"{s}x{n}": round(statistics.median(ms(turns)), 2) for (s, n), turns in found.items()},
            "ar_b16_decode_vs_best_hf": peers.over_best(answers["equal"], lambda timed: timed.decode_rate),
            "ar_single_vs_hf_assisted": peers.over_best({k: answers["single"][k] for k in ("engine", "hf assisted")}),
            "tree_rate": round(tally.rate, 3),
        }
    )


if __name__ == "__main__":
    main()
