"""Measure constrained decoding: that outputs are valid and the same with and without drafts, and what it costs.

Objects, arrays, regular expressions and choices are asked for, greedy and sampled, of two verifiers of the shipped
pair. Each call is sent with and without drafts, in one piece and resumed on the other verifier after some tokens.
`valid` is the share of outputs that follow their grammar, of those that end by themselves; `differing` counts outputs
that are not those of the same call without drafts and in one piece. `tokens_per_step_constrained_over_free` compares
the tokens of a step with drafts under a grammar with those of the same prompts without one, up to the same length: an
output's first steps come before its first drafts.

`neighbour_step_p99_ratio` is that of steps of an engine with four free sessions and four others, which write JSON under
a grammar or text without one, each with eight accepted nodes: by CPU time on one core, both arms in turns.
`mask_ms_per_node` is the time of one mask in these texts, which is needed only where the target's own choice is
forbidden or filters are set. Both are measured with the shipped target's 8,192 ids, and with 151,936 on a random
target, which knows nothing of JSON, so that most of its choices are forbidden.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.support import old_harness as harness
from benchmarks.support.engine_equality import PLAIN, SETTINGS, WAYS, Answer, Call, Devices, Way
from benchmarks.support.old_harness import Criterion, Pair, Size
from benchmarks.vocabulary import VOCABULARY, random_target
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.interface import Committed
from cloud_verifier.engine.torch_backend.executor import TorchExecutor
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from edge_agent.sdk import grammars
from outrider.core.constraint import Grammars
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Directive, SessionLimits
from outrider.core.sampling import SamplingParams

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["customer", "supplier", "employee"]},
        "address": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "maxLength": 20},
                "number": {"type": "integer", "maximum": 999},
            },
            "required": ["town", "number"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "address", "tags"],
    "additionalProperties": False,
}
STEP = r"[a-z]{2,8}( [a-z]{2,8}){0,6}"
ANSWERS = ["positive", "negative", "neither of both"]
DRAFTED = Way(drafted=True, resumed=False)
IDS, END = 8192, 0
"""Number of the shipped target's ids, and the one that ends a text."""
NEIGHBOURS, NODES = 4, 8
LIMITS = SessionLimits()
RATIO = 1.05
"""The slowest steps that are wanted, over those without a grammar."""


def _is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == PERSON["required"]
        and len(person["name"]) <= 16
        and 0 <= person["age"] <= 120
        and person["kind"] in PERSON["properties"]["kind"]["enum"]
        and len(person["tags"]) <= 3
    )


KINDS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "object": (grammars.json_schema(PERSON), _is_person),
    "list": (grammars.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 12}), json.loads),
    "steps": (grammars.regex(STEP), lambda text: re.fullmatch(STEP, text)),
    "choice": (grammars.choice(ANSWERS), ANSWERS.__contains__),
}
"""Name -> a grammar, and what says whether a text follows it (an exception means no)."""


def kind_of(call: Call) -> str:
    return next(name for name, (grammar, _) in KINDS.items() if grammar == call.grammar)


def follows(kind: str, text: str) -> bool:
    try:
        return KINDS[kind][1](text) not in (None, False)
    except (ValueError, LookupError, TypeError):
        return False


# --- outputs


async def outputs(pair: Pair, tokenizer_json: str, size: Size) -> tuple[Counter[str], dict[str, float]]:
    """Send every call in every way; return how many outputs ended, were valid, differing and resumed, and the tokens
    per step under a grammar over those without, for each kind and for "all"."""
    count, max_tokens = size.pick(smoke=(4, 48), quick=(6, 64), full=(96, 160))
    prompts = pair.encode(harness.prompts("heldout", max(2, count // len(KINDS))))
    tokenizer = Grammars(tokenizer_json, IDS, (END,)).tokenizer
    settings = list(SETTINGS)
    names = list(KINDS)
    calls = [
        Call(i, name, tuple(prompts[name]), settings[i % len(settings)], KINDS[names[i // 2 % len(names)]][0])
        for i, name in ((i, list(prompts)[i % len(prompts)]) for i in range(count))
    ]
    models = ("--model", str(pair.target), "--draft", str(pair.draft), "--threads", "1")
    found = Counter[str]()
    async with harness.cluster() as cluster:
        addresses = [(await cluster.start_verifier(*models)).address for _ in range(2)]
        async with Devices.start(addresses[0], max_tokens) as devices:

            async def send(call: Call, way: Way) -> Answer:
                where = addresses if way.resumed else addresses[:1]
                return await devices.send(call, where, drafted=way.drafted)

            answers = await asyncio.gather(*(send(call, way) for call in calls for way in WAYS))
            by_call = [answers[i : i + len(WAYS)] for i in range(0, len(answers), len(WAYS))]
            # Both arms at once: beside sessions without drafts, verifiers wait less for those of others.
            arms = [
                (kind_of(call), arm, replace(call, grammar=grammar, max_tokens=len(group[0].tokens)))
                for call, group in zip(calls, by_call, strict=True)
                for arm, grammar in (("constrained", call.grammar), ("free", ""))
            ]
            timed = await asyncio.gather(*(send(call, DRAFTED) for _, _, call in arms))
    for call, group in zip(calls, by_call, strict=True):
        plain = group[WAYS.index(PLAIN)]
        kind = kind_of(call)
        for way, answer in zip(WAYS, group, strict=True):
            found["resumed"] += answer.attaches > 1
            if answer.tokens != plain.tokens:
                found["differing"] += 1
                print(f"DIFFERING {call}, {kind}, {answer}")
            if answer.tokens[-1] == END:
                found["ended"] += 1
                text = tokenizer.decode_str(list(answer.tokens[:-1]))
                found["valid"] += (right := follows(kind, text))
                if not right:
                    print(f"INVALID {call}, {kind}, {way}: {text!r}")
    tokens, steps = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for (kind, arm, _), answer in zip(arms, timed, strict=True):
        for name in (kind, "all"):
            tokens[name, arm] += len(answer.tokens)
            steps[name, arm] += answer.steps
    ratios = {}
    for name in dict.fromkeys(name for name, _ in tokens):
        own, free = (tokens[name, arm] / steps[name, arm] for arm in ("constrained", "free"))
        ratios[name] = own / free
        print(f"tokens per step with drafts, {name}: {own:.2f} under a grammar, {free:.2f} without", flush=True)
    return found, ratios


# --- steps


def widened(tokenizer_json: str, size: int) -> str:
    """Return a tokenizer with so many ids, the further ones joined of the known ones."""
    data = json.loads(tokenizer_json)
    vocabulary, merges = data["model"]["vocab"], data["model"]["merges"]
    words = [word for word in vocabulary if 1 < len(word) < 8]
    rng, next_id = random.Random(0), 1 + max(vocabulary.values())
    while next_id < size:
        left, right = rng.choice(words), rng.choice(words)
        if left + right not in vocabulary:
            vocabulary[left + right] = next_id
            merges.append([left, right] if isinstance(merges[0], list) else f"{left} {right}")
            next_id += 1
    return json.dumps(data)


@dataclass
class SteppedSessions:
    """Run four free sessions and four others, and time the engine's steps."""

    engine: Engine
    length: int
    """Tokens of each session."""
    visits: int = 0

    def run(self, grammar: str, truths: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[float]]:
        """Return the tokens of all sessions, and the CPU seconds of each step in which all took part.

        grammar: of the second half, "" for none. truths: tokens that the devices propose; none if they draft nothing.
        """
        self.visits += 1
        given = NEIGHBOURS * [""] + NEIGHBOURS * [grammar]
        params = [SamplingParams(temperature=0.8, seed=i, grammar=one) for i, one in enumerate(given)]
        devices = {
            f"{self.visits} {i}": DeviceSession(
                [11 + i, 12, 13], sampling=one, max_tokens=self.length, min_tokens=self.length, eos_token_ids=(END,)
            )
            for i, one in enumerate(params)
        }
        directive = Directive(LIMITS.nodes, LIMITS.depth, nodes_per_step=NODES, draft_wait_ms=0)
        for name, device in devices.items():
            self.engine.start(name, device.attach(1, LIMITS), LIMITS, directive)
        seconds: list[float] = []
        while not all(device.finished for device in devices.values()):
            for number, (name, device) in enumerate(devices.items()):
                if not device.finished:
                    self._propose(name, device, truths[number] if truths else ())
            begun = time.thread_time()
            events = self.engine.step()
            taken = time.thread_time() - begun
            for event in events:
                if not isinstance(event, Committed):
                    raise RuntimeError(f"session {event.session_id} failed: {event.error}")
                devices[event.session_id].on_commit(event.commit)
            if len(events) == len(devices):
                seconds.append(taken)
        for name in devices:
            self.engine.stop(name)
        return [device.received for device in devices.values()], seconds

    def _propose(self, name: str, device: DeviceSession, truth: Sequence[int]) -> None:
        parent = 0
        for token in truth[len(device.received) :][: NODES if not len(device.tree) else 0]:
            node = device.add(parent, token)
            if node is None:
                break
            parent = node
        while (append := device.poll(resting=True)) is not None:
            self.engine.append(name, append)


def step_ratio(model: TargetModel, known: Grammars, size: Size) -> tuple[float, float]:
    """Return the 99th percentile of steps beside constrained sessions over that beside free ones, and ms of a mask."""
    length, rounds = size.pick(smoke=(72, 1), quick=(120, 1), full=(540, 12))
    config = EngineConfig(kv_slots=16 * (length + 64), token_budget=256, max_sessions=2 * NEIGHBOURS, first_token_s=1e6)
    engine = Engine(TorchExecutor(model, config), config, grammars=known)
    sessions = SteppedSessions(engine, length)
    grammar = f'start: ({grammars.embedded_schema(PERSON)} "\\n")+'
    arms = {one: sessions.run(one, ())[0] for one in (grammar, "")}
    seconds: dict[str, list[float]] = {grammar: [], "": []}
    for number in range(rounds):
        for one in harness.rotated(list(arms), number):
            tokens, taken = sessions.run(one, arms[one])
            if tokens != arms[one]:
                raise RuntimeError("drafts have changed the tokens")
            seconds[one] += taken[1:]
    state, masks = known.begin(grammar), list[float]()
    for token in arms[grammar][-1]:
        begun = time.thread_time()
        state.mask([])
        masks.append(time.thread_time() - begun)
        state.commit([token])
    slow = {one: harness.quantile(taken, 0.99) or 0.0 for one, taken in seconds.items()}
    middle = {one: statistics.median(taken) for one, taken in seconds.items()}
    print(
        f"{known.tokenizer.vocab_size} ids, steps of {2 * NEIGHBOURS} sessions x {NODES} nodes, ms: median"
        f" {1e3 * middle[grammar]:.2f} beside a grammar, {1e3 * middle['']:.2f} without; p99 {1e3 * slow[grammar]:.2f},"
        f" {1e3 * slow['']:.2f}; a mask {1e3 * statistics.mean(masks):.3f}, at most {1e3 * max(masks):.3f}",
        flush=True,
    )
    return slow[grammar] / slow[""], 1e3 * statistics.mean(masks)


def _tokenizer_json(pair: Pair) -> str:
    return (pair.target / "tokenizer.json").read_text()


def shipped(pair: Pair) -> TargetModel:
    model = TargetModel.load(pair.target, dtype="float32")
    check_numerics(model)
    return model


async def main(argv: Sequence[str] | None = None) -> None:
    options = harness.arguments("constrained", __doc__).parse_args(argv)
    size: Size = options.size
    pair = Pair.in_folder(options.models)
    disable_progress_bar()
    set_verbosity_error()
    text = _tokenizer_json(pair)
    found, over_free = await outputs(pair, text, size)
    torch.set_num_threads(1)
    ratios, masks = {}, {}
    for ids, model, tokenizer in (
        (IDS, shipped(pair), text),
        (VOCABULARY, random_target(), widened(text, VOCABULARY)),
    ):
        ratio, mask_ms = step_ratio(model, Grammars(tokenizer, ids, (END,)), size)
        ratios[str(ids)], masks[str(ids)] = round(ratio, 3), round(mask_ms, 4)
    valid = found["valid"] / found["ended"] if found["ended"] else 0.0
    criteria = [
        Criterion.bound("valid outputs of those that ended", valid, at_least=1.0, enforced_from=Size.SMOKE),
        Criterion.none("outputs that differ from those without drafts and in one piece", found["differing"]),
        Criterion.bound("resumed outputs", found["resumed"], at_least=1.0, enforced_from=Size.SMOKE),
        Criterion.bound("tokens per step under a grammar over those without", over_free["all"], at_least=1.0),
        *(
            Criterion.bound(f"p99 of steps beside a grammar, {ids} ids", ratio, at_most=RATIO, enforced_from=None)
            for ids, ratio in ratios.items()
        ),
    ]
    result = {
        "valid": round(valid, 4),
        "ended": found["ended"],
        "differing": found["differing"],
        "resumed": found["resumed"],
        "tokens_per_step_constrained_over_free": round(over_free["all"], 3),
        "tokens_per_step_by_kind": {name: round(ratio, 3) for name, ratio in over_free.items() if name in KINDS},
        "neighbour_step_p99_ratio": ratios,
        "mask_ms_per_node": masks,
    }
    harness.finish(result, criteria, size)


if __name__ == "__main__":
    asyncio.run(main())
