"""Drive an engine with scripted drafters on a clock of their own, without wire or threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from even_allocation import evenly
from session_messages import attach, directive
from tiny_targets import EOS, VOCAB

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.interface import Committed, Event, Failed
from cloud_verifier.engine.row_allocation import AllocationPolicy
from cloud_verifier.engine.torch_backend.executor import TorchExecutor
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.errors import OutriderError
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Append, Attach, Directive, SessionLimits, append_message
from outrider.core.tree import ROOT

LIMITS = SessionLimits(nodes=24, depth=8, in_flight=48, run_ahead=32)
DIRECTIVE = directive(window_nodes=24, window_depth=8, nodes_per_step=8, draft_wait_ms=5)

Drafter = Callable[[DeviceSession, random.Random], None]
"""A function that adds nodes to a device's tree."""


class Clock:
    """Advance only when a test lets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def nothing(device: DeviceSession, rng: random.Random) -> None:
    """Draft nothing."""


def perfect(expected: Sequence[int]) -> Drafter:
    """Draft what the target will generate."""

    def draft(device: DeviceSession, rng: random.Random) -> None:
        _follow(device, expected[len(device.received) :])

    return draft


def random_tree(device: DeviceSession, rng: random.Random) -> None:
    """Draft a bushy tree of random tokens."""
    for _ in range(6):
        device.add(rng.choice([ROOT, *(node.id for node in device.tree)]), rng.randrange(VOCAB))


def adversary(expected: Sequence[int]) -> Drafter:
    """Draft the right path with wrong siblings everywhere, ends in its midst, and right tokens under wrong parents."""

    def draft(device: DeviceSession, rng: random.Random) -> None:
        future = expected[len(device.received) :]
        device.add(ROOT, EOS)
        spine = _follow(device, future[: rng.randrange(5)])
        for parent in [ROOT, *spine]:
            device.add(parent, rng.randrange(VOCAB))
        wrong = device.add(ROOT, rng.randrange(VOCAB))
        if wrong is not None:
            device.add(wrong, future[1] if len(future) > 1 else 0)

    return draft


def _follow(device: DeviceSession, tokens: Sequence[int]) -> list[int]:
    """Return node ids along `tokens` from the root; missing nodes are added."""
    path: list[int] = []
    for token in tokens:
        parent = path[-1] if path else ROOT
        node = device.tree.child(parent, token)
        if node is None:
            node = device.add(parent, token)
        if node is None:
            break
        path.append(node)
    return path


@dataclass
class Client:
    """Hold one device and what it has received."""

    device: DeviceSession
    draft: Drafter = nothing
    directive: Directive = field(default_factory=lambda: DIRECTIVE)
    limits: SessionLimits = LIMITS
    salt: str = ""
    errors: list[OutriderError] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.device.finished or bool(self.errors)


def client(prompt: Sequence[int], draft: Drafter = nothing, max_tokens: int = 24, **options: Any) -> Client:
    salt = options.pop("salt", "")
    device = DeviceSession(attach(0, prompt, max_tokens=max_tokens, **options), (EOS,))
    return Client(device, draft, salt=salt)


def engine_over(model: TargetModel, config: EngineConfig | None = None) -> Engine:
    """Return an engine over an executor of the model, with the clock of this machine."""
    config = config or EngineConfig()
    return Engine(TorchExecutor(model, config), config)


class Rig:
    """Connect an engine and its devices, without a network between them."""

    def __init__(
        self,
        model: TargetModel,
        config: EngineConfig | None = None,
        seed: int = 0,
        allocation: AllocationPolicy = evenly,
        **parts: Any,
    ) -> None:
        """Set up the rig. allocation: evenly by default, so that the speed of this machine decides nothing. parts: cost
        and class of the executor, and what the engine takes."""
        self.clock = Clock()
        config = config or EngineConfig(kv_slots=1024, max_sessions=16)
        self.executor = parts.pop("executor", TorchExecutor)(model, config, parts.pop("cost", None))
        self.engine = Engine(self.executor, config, self.clock, **parts)
        self.engine.allocation = allocation
        self.clients: dict[str, Client] = {}
        self.rng = random.Random(seed)

    def attach(self, session_id: str, joining: Client, epoch: int | None = None) -> None:
        """Attach a session, for the first time or again."""
        epoch = joining.device.epoch + 1 if epoch is None else epoch
        message = joining.device.attach(epoch, joining.limits)
        self.engine.start(session_id, message, joining.limits, joining.directive, joining.salt)
        self.clients[session_id] = joining

    def turn(self) -> list[Event]:
        """Let every device draft and send, make a step of the engine, and deliver its commits."""
        for session_id, one in self.clients.items():
            if not one.ended:
                one.draft(one.device, self.rng)
                while (append := one.device.poll(resting=True)) is not None:
                    self.engine.append(session_id, append)
        events = self.engine.step()
        for event in events:
            self.hear(event)
        self.clock.now += 0.001
        return events

    def hear(self, event: Event) -> None:
        one = self.clients.get(event.session_id)
        match event:
            case Committed(_, commit) if one is not None:
                one.device.on_commit(commit)
            case Failed(error=error) if one is not None:
                one.errors.append(error)

    def run(self, turns: int = 2_000) -> None:
        """Step until every session has finished."""
        for _ in range(turns):
            if all(one.ended for one in self.clients.values()):
                return
            self.turn()
        raise AssertionError("some sessions never end")

    @property
    def slots(self) -> tuple[int, int]:
        """Return (slots that hold a token, slots promised)."""
        stats = self.engine.stats()
        return stats.verifier.kv_used, stats.kv_reserved


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1_000 * seed + length).choices(range(VOCAB), k=length)


def attach_of(prompt: Sequence[int], **changes: Any) -> Attach:
    return attach(prompt=prompt, **{"max_tokens": 16} | changes)


def nodes(*tokens: int, epoch: int = 1, first_id: int = 1, base: int = 0) -> Append:
    """Return an Append whose nodes are children of the root."""
    return append_message(epoch, first_id, base, (0,) * len(tokens), tokens)
