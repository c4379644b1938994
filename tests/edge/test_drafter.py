"""Test the drafter: a tree that grows by path acceptance, moves with every Commit and learns from it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scripted import VOCABULARY, ScriptedSource, continuation, target

from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter, DraftUpdate
from edge_agent.drafting.growth import DecodeLatency, SpeculationPlan
from edge_agent.drafting.sources.base import DraftSource, DraftTask, NodeContext, Proposal
from edge_agent.drafting.sources.ngram import NgramSource
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.proposals import CERTAIN
from outrider.core.tree import ROOT
from outrider.llama import TreeFull

PLAN = SpeculationPlan(nodes=24, depth=8, nodes_per_step=10, min_acceptance=0.05, draft_wait_s=0.008, step_s=0.01)
WIDTHS = DecodeLatency(((1, 1e-3), (4, 2e-3)))
PROMPT = (1, 2, 3)


def model(source: DraftSource, latency: DecodeLatency = WIDTHS) -> CalibratedSource:
    return CalibratedSource(source, Calibrator(), Calibrator(), latency, VOCABULARY)


def free(source: DraftSource) -> CalibratedSource:
    """Return a source whose calls cost nothing."""
    return CalibratedSource(source, Calibrator(), Calibrator())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drafter(
    source: ScriptedSource | None = None, *, plan: SpeculationPlan = PLAN, clock: Clock | None = None, **task: object
) -> Drafter:
    made = Drafter([model(source or ScriptedSource())], clock or Clock())
    made.begin(DraftTask(PROMPT, **task), plan)  # type: ignore[arg-type]
    return made


def grown(made: Drafter) -> DraftUpdate:
    """Return everything that the drafter drafts before it rests."""
    updates: list[DraftUpdate] = []
    while True:
        moved = made.step()
        growth = made.harvest(moved=moved)
        updates += [growth] if growth else []
        if not moved:
            nodes = tuple(node for growth in updates for node in growth.nodes)
            return DraftUpdate(updates[-1].base, nodes, True)


def spine(growth: DraftUpdate) -> list[int]:
    """Return the tokens along the first child of each node."""
    tokens, parent = [], ROOT
    while child := next((node for node in growth.nodes if node.parent == parent), None):
        tokens.append(child.token)
        parent = child.id
    return tokens


def test_a_draft_of_the_target_guesses_the_continuation() -> None:
    growth = grown(drafter())
    guessed = spine(growth)
    assert len(guessed) >= 5
    assert guessed == continuation(PROMPT, len(guessed))
    assert growth.base == 0


def test_what_descends_from_the_committed_tokens_survives() -> None:
    made = drafter()
    before = grown(made)
    right = continuation(PROMPT, 20)
    made.advance(right[:2])
    offered = {node.id for node in before.nodes}
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node in before.nodes:
        paths[node.id] = (*paths[node.parent], node.token)
    descend = {i for i, path in paths.items() if len(path) > 2 and path[:2] == tuple(right[:2])}
    assert descend and {node.id for node in made._tree} & offered == descend
    after = grown(made)
    assert after.base == 2
    assert offered.isdisjoint(node.id for node in after.nodes)  # each node is offered once


def test_after_a_miss_it_starts_afresh_below_the_new_token() -> None:
    made = drafter()
    grown(made)
    wrong = (target(PROMPT) + 40) % VOCABULARY
    made.advance([wrong])
    growth = grown(made)
    assert growth.base == 1
    assert spine(growth)[:3] == continuation((*PROMPT, wrong), 3)


def test_nothing_is_drafted_below_an_end_or_past_the_maximum() -> None:
    right = continuation(PROMPT, 8)
    ended = drafter(ends=frozenset({right[1]}))
    assert len(spine(grown(ended))) == 2
    short = drafter(max_tokens=3)
    assert len(spine(grown(short))) == 3
    short.advance(right[:3])
    assert not short.step()


def test_a_bad_draft_unlearns_its_optimism() -> None:
    made = drafter(ScriptedSource(0.0), max_tokens=10_000)
    first = len(grown(made).nodes)
    sequence = list(PROMPT)
    for _ in range(80):
        token = (target(sequence) + 40) % VOCABULARY  # never what the draft says
        made.advance([token])
        sequence.append(token)
        last = len(grown(made).nodes)
    assert last <= 2 < first


class Echo(ScriptedSource):
    """Propose 8, and 50 as the second best, everywhere."""

    def _propose(self, sequence: list[int]) -> list[Proposal]:
        return [Proposal(8, 0, 1.0), Proposal(50, 1, 1.0)]


def test_sources_are_merged_by_parent_and_token() -> None:
    prompt = (5, 6, 7, 8, 9, 5, 6, 7)

    made = Drafter([model(Echo()), free(NgramSource())], Clock())
    made.begin(DraftTask(prompt), PLAN)
    made.step()
    children = made._tree.children(ROOT)
    assert list(children).count(8) == 1
    below = made._tree.children(children[8])
    assert 9 in below  # n-grams went on below the node that both proposed, before the model was asked


def test_tokens_that_the_draft_does_not_know_are_never_evaluated() -> None:
    prompt = (500, 501, 502, 500, 501)
    source = ScriptedSource()
    seen: list[int] = []
    source.expand = lambda nodes, inner=source.expand: seen.extend(s.token for s in nodes) or inner(nodes)  # type: ignore
    made = Drafter([model(source), free(NgramSource())], Clock())
    made.begin(DraftTask(prompt), PLAN)
    grown(made)
    assert 502 in made._tree.children(ROOT)
    assert 502 not in seen


@pytest.mark.parametrize("quality", [0.3, 0.8, 1.0])
def test_offered_nodes_are_the_mirrors_own_however_commits_fall(quality: float) -> None:
    made = drafter(ScriptedSource(quality), max_tokens=500)
    sequence = list(PROMPT)
    offered: set[int] = set()
    for i in range(60):
        growth = grown(made)
        assert offered.isdisjoint(node.id for node in growth.nodes)
        offered |= {node.id for node in growth.nodes}
        step = continuation(sequence, 1 + i % 4)
        sequence += step
        made.advance(step)
        assert made._tree.position == len(sequence) - len(PROMPT)


class Forcing:
    """Propose what must follow after some tokens, as a grammar says it; count what the model is asked for."""

    def __init__(self, forced: dict[int, int], model: ScriptedSource) -> None:
        self._forced = forced
        self.calls: list[list[tuple[int, ...]]] = []
        inner = model.expand

        def expand(nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
            self.calls.append([node.path for node in nodes])
            return inner(nodes)

        model.expand = expand  # type: ignore[method-assign]

    def begin(self, task: DraftTask) -> None: ...

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None: ...

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        return [
            [Proposal(self._forced[node.token], 0, CERTAIN)] if node.token in self._forced else [] for node in nodes
        ]


def forcing(forced: dict[int, int], widest: int = 8) -> tuple[Drafter, Forcing]:
    """Return a drafter with a perfect model beside which these tokens (key) force the next one (value)."""
    below = ScriptedSource(quality=1.0)
    source = Forcing(forced, below)
    made = Drafter([model(below, DecodeLatency(((1, 1e-3), (widest, 1.2e-3)))), free(source)], Clock())
    made.begin(DraftTask(PROMPT), PLAN)
    return made, source


def test_tokens_that_must_follow_are_evaluated_in_one_decode_with_the_node_above_them() -> None:
    first = target(PROMPT)
    made, source = forcing({first: 90, 90: 91, 91: 92})
    assert made.step() and source.calls == [[()]]
    assert made.step()
    above = [(first,), (first, 90), (first, 90, 91), (first, 90, 91, 92)]
    assert source.calls[1][:4] == above
    growth = grown(made)
    by_token = {node.token: node for node in growth.nodes}
    assert [by_token[token].parent for token in (90, 91, 92)] == [by_token[token].id for token in (first, 90, 91)]
    below = target((*PROMPT, first, 90, 91, 92))
    assert any(node.parent == by_token[92].id and node.token == below for node in growth.nodes)
    asked = [path for call in source.calls for path in call]
    assert len(asked) == len(set(asked))  # nothing twice
    made.advance([first, 90])  # a verifier that has evaluated only these
    assert made.step() or made.harvest(moved=False) is not None
    assert made._states[ROOT].proposals.children.keys() == {91}


class Chatty(Forcing):
    def __init__(self) -> None:
        super().__init__({}, ScriptedSource())

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        return [[Proposal(60 + i, i, 1.0) for i in range(3)] for _ in nodes]


def test_a_cheap_source_leaves_room_for_what_a_model_knows() -> None:
    plan = SpeculationPlan(16, 8, 10, 0.01, 0.008, 0.01)
    made = Drafter([model(ScriptedSource(quality=1.0)), free(Chatty())], Clock())
    made.begin(DraftTask(PROMPT), plan)
    assert made.step()
    guesses = [node for node in made._tree if not made._states[node.parent].evaluated]
    assert len(guesses) == 8 and len(made._tree) < 16
    growth = grown(made)
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node in growth.nodes:
        paths[node.id] = (*paths[node.parent], node.token)
    assert tuple(continuation(PROMPT, 2)) in paths.values()


def test_in_a_full_tree_a_better_node_takes_the_place_of_the_least_one_that_was_not_sent() -> None:
    plan = SpeculationPlan(6, 8, 6, 0.01, 0.008, 0.01)

    def begun() -> Drafter:
        made = Drafter([model(ScriptedSource(quality=1.0)), free(Chatty())], Clock())
        made.begin(DraftTask(PROMPT), plan)
        return made

    unsent = begun()
    while unsent.step():
        assert len(unsent._tree) <= 6
    assert [node.token for node in unsent._tree] == continuation(PROMPT, 6)
    sent = begun()
    while len(sent._tree) < 6:
        assert sent.step()
    update = sent.harvest(moved=False)
    assert update is not None and len(update.nodes) == 6
    while sent.step():
        pass
    assert {node.id for node in update.nodes} == {node.id for node in sent._tree}


def two(first: ScriptedSource, second: ScriptedSource, latency: DecodeLatency = WIDTHS) -> Drafter:
    made = Drafter([model(first), model(second, latency)], Clock())
    made.begin(DraftTask(PROMPT, max_tokens=10_000), PLAN)
    return made


class Crowded(ScriptedSource):
    """Have room for the root and no other node."""

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        if any(node.id for node in nodes):
            raise TreeFull("no cells")
        return super().expand(nodes)


@pytest.mark.parametrize("sources", [(Crowded(), ScriptedSource()), (ScriptedSource(), Crowded())])
def test_a_model_whose_context_is_full_leaves_the_others_drafting(sources: tuple[ScriptedSource, ...]) -> None:
    alone = spine(grown(drafter()))
    made = two(*sources)
    for tokens in ([], alone[:1]):
        if tokens:
            made.advance(tokens)
        while made.step():
            pass
        assert max(item.depth for item in made._ranked()) == PLAN.depth
        assert not made.step()


def test_a_full_context_rests_until_the_next_commit() -> None:
    made = drafter(Crowded())
    assert made.step() and not made.step() and not made.step()
    made.advance([target(PROMPT)])
    assert made.step()
