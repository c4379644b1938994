"""Test the draft of one session: nodes arrive late, and another draft takes over."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

from scripted import continuation, target
from session_messages import attach, commit

from edge_agent.drafting.draft_session import DraftSession
from edge_agent.drafting.drafter import DraftNode, DraftUpdate
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.loading import NGRAM, Draft
from edge_agent.drafting.pool import DraftPool
from edge_agent.drafting.worker import DraftWorker
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import SessionLimits
from outrider.core.tree import ROOT, TokenTree

PROMPT = (1, 2, 3)
PLAN = SpeculationPlan(nodes=64, depth=64, nodes_per_step=4, min_acceptance=0.1, draft_wait_s=0.0, step_s=0.01)


class ManualWorker:
    """Send updates when the test says so."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.begins = 0
        self.plans: list[SpeculationPlan] = []
        self.committed: list[int] = []
        self._report: Any = None

    def begin(self, task: object, plan: SpeculationPlan, report: Any) -> None:
        self.begins, self.plans, self._report = self.begins + 1, [plan], report

    def commit(self, tokens: tuple[int, ...]) -> None:
        self.committed += tokens

    def replan(self, plan: SpeculationPlan) -> None:
        self.plans.append(plan)

    async def update(self, *nodes: tuple[int, int, int], base: int = 0, resting: bool = False) -> None:
        self._report(DraftUpdate(base, tuple(DraftNode(*node) for node in nodes), resting))
        await asyncio.sleep(0)

    async def fail(self, why: str = "it broke") -> None:
        self._report(why)
        await asyncio.sleep(0)


class ManualPool(DraftPool):
    """Hold drafts with one worker each, which the test moves by hand."""

    def __init__(self) -> None:
        super().__init__(2)
        self.ngram = None

    async def take(self, draft: Draft) -> DraftWorker:
        assert isinstance(draft, ManualDraft)
        draft.users += 1
        return cast(DraftWorker, draft.manual)

    def give_back(self, worker: DraftWorker) -> None:
        worker.draft.users -= 1


class ManualDraft(Draft):
    def __init__(self, release: str) -> None:
        super().__init__(release, release)
        self.manual = ManualWorker(self)

    @property
    def has_model(self) -> bool:
        return self.name != NGRAM


class Device:
    """Hold an attached session and its draft."""

    def __init__(self, limits: SessionLimits | None = None) -> None:
        self.session = DeviceSession(attach(0, PROMPT, max_tokens=500))
        self.session.attach(1, limits or SessionLimits())
        self.old, self.new = ManualDraft("old"), ManualDraft("new")
        self.draft = DraftSession(self.session, ManualPool())
        self.old.users = 1
        self.draft.use(cast(DraftWorker, self.old.manual))
        self.draft.vocabulary_size = 1000
        self.changes: list[str] = []
        self.gaps_s: list[float] = []
        self.draft.begin(PLAN, lambda: self.changes.append(self.draft.release or ""), self.gaps_s.append)

    def commit(self, *tokens: int) -> None:
        delivery = self.session.on_commit(commit(1, len(self.session.received), tokens, 0))
        assert delivery is not None
        self.draft.commit(delivery)

    async def grow(self, base: int, *nodes: tuple[int, int, int]) -> int:
        """Return how many of the old draft's nodes were added."""
        before = len(self.session.tree)
        await self.old.manual.update(*nodes, base=base)
        return len(self.session.tree) - before

    def paths(self) -> set[tuple[int, ...]]:
        return {tuple(self.session.tree.path(node.id)) for node in self.session.tree}


async def settled(device: Device) -> None:
    """Let everything that the pool has begun in the background end."""
    while tasks := device.draft._pool._tasks:
        await asyncio.wait(tasks)


# --- what comes in late


async def test_a_node_whose_token_was_committed_meanwhile_still_carries_its_children() -> None:
    device = Device()
    device.commit(10, 11)
    assert await device.grow(0, (1, ROOT, 10), (2, 1, 11), (3, 2, 12)) == 1
    assert device.paths() == {(12,)}


async def test_what_contradicts_a_commit_is_dropped_with_all_below_it() -> None:
    device = Device()
    device.commit(10)
    assert await device.grow(0, (1, ROOT, 9), (2, 1, 11), (3, 99, 12)) == 0
    assert device.paths() == set()


async def test_children_of_a_node_that_became_a_token_hang_below_the_root() -> None:
    device = Device()
    await device.grow(0, (1, ROOT, 10), (2, 1, 11))
    device.commit(10, 11)
    assert await device.grow(0, (3, 2, 12)) == 1
    assert device.paths() == {(12,)}


async def test_whatever_the_delay_the_sessions_tree_is_the_drafters_at_the_same_position() -> None:
    """This holds for growth that is delayed by a random number of commits."""
    for seed in range(60):
        rng = random.Random(seed)
        device, mirror, right = Device(), TokenTree(), continuation(PROMPT, 200)
        late: list[tuple[int, DraftNode]] = []
        next_id = 1
        while len(device.session.received) < 100:
            for _ in range(rng.randint(0, 4)):
                parent = rng.choice([ROOT, *(node.id for node in mirror)])
                good = target([*PROMPT, *right[: mirror.position], *mirror.path(parent)])
                token = good if rng.random() < 0.8 else rng.randrange(97)
                if mirror.child(parent, token) is None and mirror.depth(parent) < 8 and len(mirror) < 40:
                    late.append((mirror.position, DraftNode(next_id, parent, token)))
                    mirror.add(next_id, parent, token)
                    next_id += 1
            if rng.random() < 0.5:
                count = rng.randint(1, 3)
                at = len(device.session.received)
                device.commit(*right[at : at + count])
            if rng.random() < 0.4:  # the drafter hears of the commits, after its growth so far has come in
                for base, node in late:
                    await device.grow(base, (node.id, node.parent, node.token))
                late = []
                mirror.advance(right[mirror.position : len(device.session.received)])
                assert device.paths() == {tuple(mirror.path(node.id)) for node in mirror}


# --- another draft takes over


async def test_another_draft_takes_over_when_it_has_read_what_the_old_one_drafts_for() -> None:
    device = Device()
    await device.old.manual.update((1, ROOT, 10))
    await device.draft.change_to(device.new)
    assert not device.new.manual.plans[0].speculates  # it only reads
    device.commit(10)
    assert device.new.manual.committed == device.old.manual.committed == [10]
    await device.old.manual.update((2, 1, 11), base=1)
    assert device.draft.release == "old" and device.paths() == {(11,)}
    await device.new.manual.update(base=0, resting=True)
    assert device.draft.release == "new" and (device.old.users, device.new.users) == (0, 1)
    assert device.new.manual.plans[-1].speculates
    assert device.changes[-1] == "new" and device.paths() == {(11,)}  # announced before the first of its nodes
    await device.new.manual.update((1, ROOT, 20), base=1)
    assert device.paths() == {(11,), (20,)}


async def test_a_new_drafts_node_ids_are_not_taken_for_the_old_ones() -> None:
    device = Device()
    await device.old.manual.update((1, ROOT, 10), (2, 1, 11))
    await device.draft.change_to(device.new)
    await device.new.manual.update(resting=True)
    await device.new.manual.update((3, 2, 30), (1, ROOT, 20), (2, 1, 21))
    assert device.paths() == {(10,), (10, 11), (20,), (20, 21)}


async def test_the_new_draft_grows_into_the_room_that_the_old_ones_nodes_leave() -> None:
    device = Device(SessionLimits(nodes=4, depth=4, in_flight=8, run_ahead=8))
    await device.draft.change_to(device.new)
    await device.old.manual.update((1, ROOT, 10), (2, 1, 11), (3, ROOT, 12))
    await device.new.manual.update(resting=True)
    assert device.new.manual.plans[-1].nodes == 1
    await device.new.manual.update((1, ROOT, 20))
    device.commit(20)  # the old one's nodes are gone
    assert device.new.manual.plans[-1].nodes == 4


async def test_a_draft_that_fails_while_it_reads_changes_nothing() -> None:
    device = Device()
    await device.draft.change_to(device.new)
    await device.new.manual.fail()
    assert device.draft.release == "old" and not device.draft.failure
    assert (device.old.users, device.new.users) == (1, 0)
    assert await device.grow(0, (1, ROOT, 10)) == 1


async def test_n_grams_that_cannot_begin_after_a_failed_model_are_not_asked_again_and_their_reason_is_noted() -> None:
    device, ngram = Device(), ManualDraft(NGRAM)
    device.draft._pool.ngram = ngram
    await device.old.manual.fail()
    await settled(device)
    changes = len(device.changes)
    await ngram.manual.fail("the grammar cannot be followed")
    await settled(device)
    assert ngram.manual.begins == 1 and ngram.users == device.old.users == 0
    assert not device.draft.drafting and len(device.changes) > changes
    assert (device.draft.name, device.draft.failure) == (NGRAM, "the grammar cannot be followed")


async def test_a_change_that_is_overtaken_while_its_worker_starts_gives_the_worker_back() -> None:
    device, third = Device(), ManualDraft("third")
    started = asyncio.Event()
    pool = device.draft._pool
    taken = pool.take

    async def slowly(draft: Draft) -> DraftWorker:
        if draft is device.new:
            await started.wait()
        return await taken(draft)

    pool.take = slowly  # type: ignore[method-assign]
    late = asyncio.create_task(device.draft.change_to(device.new))
    await asyncio.sleep(0)
    await device.draft.change_to(third)
    started.set()
    await late
    assert (device.new.users, third.users) == (0, 1)


async def test_the_end_gives_every_worker_back() -> None:
    device, late = Device(), ManualDraft("late")
    await device.draft.change_to(device.new)
    device.draft.end()
    assert device.old.users == device.new.users == 0
    await device.draft.change_to(late)
    assert late.users == 0 and not device.draft.drafting
