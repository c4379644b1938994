"""Test that the prefix cache saves computation and changes no token."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from rig import Client, Rig, client, nothing, perfect, prompt_of, random_tree
from tiny_targets import Reference

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.errors import Overloaded
from outrider.core.protocol.messages import Cancel
from outrider.core.sampling import SamplingParams

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]


@pytest.fixture
def llama(target: Target) -> TargetModel:
    return target("llama")


def complete(rig: Rig, name: str, prompt: list[int], max_tokens: int = 12, **options: Any) -> tuple[list[int], int]:
    """Run one session from beginning to end; return its tokens and how many were prefilled for it."""
    before = rig.engine.counters.prefilled
    rig.attach(name, client(prompt, max_tokens=max_tokens, ignore_eos=True, **options))
    rig.run()
    return rig.clients[name].device.received, rig.engine.counters.prefilled - before


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_the_second_turn_of_a_chat_prefills_only_what_is_new(kind: str, target: Target, reference: Plain) -> None:
    rig = Rig(target(kind))
    first = prompt_of(40)
    answer, prefilled = complete(rig, "one", first)
    assert prefilled == 39
    second = [*first, *answer, *prompt_of(7)]
    again, prefilled = complete(rig, "two", second)
    assert again == reference(kind).generate(second, 12, ignore_eos=True)
    # The last token of the answer was never put into the pool, and the last of the prompt is no prefill.
    assert prefilled == 1 + 7 - 1
    stats, counters = rig.engine.stats(), rig.engine.counters
    assert (counters.prefix_hits, counters.prefix_tokens) == (1, 40 + 11)
    assert stats.kv_cached == len(second) + 11
    assert rig.slots == (0, 0)


def test_sessions_share_a_system_prompt_while_they_live_and_hold_it_once(llama: TargetModel, reference: Plain) -> None:
    rig = Rig(llama, EngineConfig(kv_slots=256))
    system = prompt_of(100)
    rig.attach("first", client([*system, 1], max_tokens=30, ignore_eos=True))
    rig.turn()
    for i in range(2):  # a third of the pool was not enough for either without the shared part
        rig.attach(f"s{i}", client([*system, 2 + i], max_tokens=20, ignore_eos=True))
    rig.turn()
    assert rig.slots[0] < 100 + 3 * 20
    rig.run()
    for name, end in (("s0", 2), ("s1", 3)):
        assert rig.clients[name].device.received == reference("llama").generate([*system, end], 20, ignore_eos=True)
    assert rig.engine.counters.prefilled == 100
    assert rig.slots == (0, 0)


class Crowd:
    """Run chats that come, go, are cut off and come back at random, in a pool far too small for them."""

    def __init__(self, model: TargetModel, plain: Reference, seed: int, *, cache: bool, slots: int) -> None:
        config = EngineConfig(kv_slots=slots, token_budget=16, max_sessions=6, prefix_cache=cache)
        self.rig = Rig(model, config, seed)
        self.rng = random.Random(seed)
        self.plain = plain
        self.histories = [prompt_of(24, 90)] * 3 + [prompt_of(10, 91)]
        self.live: dict[str, tuple[Client, int]] = {}
        """session id -> its device and the chat that it continues"""
        self.through: list[Client] = []
        """Sessions that ran to their end."""
        self.count = 0

    def act(self) -> None:
        """Begin, cancel or attach a random session, or none; then take a step."""
        dice = self.rng.random()
        if dice < 0.25 and len(self.live) < 6:
            self.begin()
        elif dice < 0.35 and self.live:
            name = self.rng.choice(sorted(self.live))
            one, _ = self.live.pop(name)
            self.rig.engine.cancel(name, Cancel(epoch=one.device.epoch))
        elif dice < 0.45 and self.live:
            name = self.rng.choice(sorted(self.live))
            one, _ = self.live[name]
            if self.rng.random() < 0.5:
                self.rig.engine.stop(name)
            try:
                self.rig.attach(name, one)
            except Overloaded:
                del self.live[name]
        self.rig.turn()
        for name, (one, chat) in list(self.live.items()):
            assert not one.errors
            if one.device.finished:
                del self.live[name]
                self.through.append(one)
                whole = [*one.device.prompt, *one.device.received]
                self.histories[chat] = whole if len(whole) < 90 else whole[:24]

    def begin(self) -> None:
        chat = self.rng.randrange(len(self.histories))
        prompt = self.histories[chat] + self.rng.choices(range(8, 12), k=self.rng.randrange(1, 6))
        draft = self.rng.choice([nothing, random_tree, perfect(self.rng.choices(range(100), k=20))])
        params = self.rng.choice([SamplingParams(), SamplingParams(temperature=0.8, seed=3)])
        one = client(prompt, draft, self.rng.randrange(1, 20), sampling=params, salt=self.rng.choice("ab"))
        self.count += 1
        name = f"s{self.count}"
        try:
            self.rig.attach(name, one)
        except Overloaded:
            return
        self.live[name] = one, chat

    def check(self) -> None:
        """Check that all tokens equal those of plain transformers, and that every slot is back."""
        self.through += [one for one, _ in self.live.values()]
        self.rig.clients = {name: one for name, (one, _) in self.live.items()}
        self.rig.run()
        for one in self.through:
            device = one.device
            assert device.received == self.plain.generate(list(device.prompt), device.max_tokens, device.sampling)
        assert self.rig.slots == (0, 0)
        pool = self.rig.executor.pool
        assert sorted(pool.allocate(pool.slots).tolist()) == list(range(pool.slots))


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_the_cache_changes_no_sessions_tokens_whatever_comes_and_goes(
    seed: int, cache: bool, llama: TargetModel, reference: Plain
) -> None:
    crowd = Crowd(llama, reference("llama"), seed, cache=cache, slots=260)
    for _ in range(100):
        crowd.act()
    crowd.check()
    counters = crowd.rig.engine.counters
    assert len(crowd.through) > 8
    assert (counters.prefix_hits > 10) == cache
