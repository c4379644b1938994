"""Test the drafter: a tree that grows by path acceptance, moves with every Commit and learns from it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scripted import VOCABULARY, ScriptedSource, continuation, target

from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter, DraftUpdate
from edge_agent.drafting.growth import DecodeLatency, RankedNode, SpeculationPlan, choose_leaves
from edge_agent.drafting.health import DraftHealth, FirstAcceptance
from edge_agent.drafting.sources.base import DraftTask, NodeContext, Proposal
from edge_agent.drafting.sources.ngram import PromptLookup
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.proposals import CERTAIN
from outrider.core.tree import ROOT, Node
from outrider.llama import TreeFull

PLAN = SpeculationPlan(nodes=24, depth=8, nodes_per_step=10, min_acceptance=0.05, draft_wait_s=0.008, step_s=0.01)
WIDTHS = DecodeLatency(((1, 1e-3), (4, 2e-3)))
PROMPT = (1, 2, 3)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def drafter(
    source: ScriptedSource | None = None, *, plan: SpeculationPlan = PLAN, clock: Clock | None = None, **task: object
) -> Drafter:
    made = Drafter(
        CalibratedSource(source or ScriptedSource(), Calibrator(), Calibrator()), None, WIDTHS, clock or Clock()
    )
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


def test_ancestors_come_before_descendants() -> None:
    seen = {ROOT}
    for node in grown(drafter(ScriptedSource(0.6))).nodes:
        assert node.parent in seen
        seen.add(node.id)


def test_the_tree_stays_within_nodes_and_depth() -> None:
    made = drafter(ScriptedSource(0.6), plan=SpeculationPlan(7, 3, 10, 0.01, 0.008, 0.01))
    grown(made)
    assert len(made._tree) <= 7
    assert max(made._tree.depth(node.id) for node in made._tree) <= 3


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
    assert made.awaited
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


def test_a_plan_without_speculation_rests_at_once() -> None:
    made = drafter(plan=SpeculationPlan(0, 8, 10, 0.05, 0.008, 0.01))
    assert not made.step()
    growth = made.harvest(moved=False)
    assert growth == DraftUpdate(0, (), resting=True)
    assert made.harvest(moved=False) is None  # said once per Commit


def test_a_better_draft_is_believed_further_after_it_was_right() -> None:
    made = drafter()
    at_first = len(spine(grown(made)))
    done: list[int] = []
    right = continuation(PROMPT, 100)
    while len(done) < 60:
        made.advance(right[len(done) : len(done) + 3])
        done += right[len(done) : len(done) + 3]
        grown(made)
    made.advance([0])
    assert len(spine(grown(made))) >= at_first


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


def test_the_first_nodes_after_a_commit_wait_for_their_children_and_then_go() -> None:
    clock = Clock()
    made = drafter(clock=clock)
    assert made.step()
    assert made.harvest(moved=True) is None  # one more level pays for a decode of 1 ms
    clock.now = 0.006
    assert made.awaited
    growth = made.harvest(moved=True)
    assert growth is not None and growth.nodes
    assert not made.awaited


def test_while_the_verifier_has_nodes_more_are_collected_for_a_moment() -> None:
    clock = Clock()
    made = drafter(clock=clock)
    made.step()
    clock.now = 1.0
    assert made.harvest(moved=True) is not None
    made.step()
    assert made.harvest(moved=True) is None
    clock.now += 0.003
    growth = made.harvest(moved=True)
    assert growth is not None and growth.nodes


def test_a_full_context_rests_until_the_next_commit() -> None:
    class Full(ScriptedSource):
        def expand(self, spots: list[NodeContext]) -> list[list[Proposal]]:  # type: ignore[override]
            if any(spot.id for spot in spots):
                raise TreeFull("no cells")
            return super().expand(spots)

    made = drafter(Full())
    assert made.step() and not made.step() and not made.step()
    made.advance([target(PROMPT)])
    assert made.step()


def test_sources_are_merged_by_parent_and_token() -> None:
    prompt = (5, 6, 7, 8, 9, 5, 6, 7)

    class Echo(ScriptedSource):
        def _guess(self, sequence: list[int]) -> list[Proposal]:
            return [Proposal(8, 0, 1.0), Proposal(50, 1, 1.0)]

    lookup = CalibratedSource(PromptLookup(), Calibrator(), Calibrator(), leads=False)
    made = Drafter(CalibratedSource(Echo(), Calibrator(), Calibrator()), lookup, WIDTHS, Clock())
    made.begin(DraftTask(prompt), PLAN)
    made.step()
    children = made._tree.children(ROOT)
    assert list(children).count(8) == 1
    below = made._tree.children(children[8])
    assert 9 in below  # look-up went on below the node that both proposed, before the model was asked


def test_a_node_that_look_up_brought_falls_when_the_model_says_something_else() -> None:
    class Echo(ScriptedSource):
        def _guess(self, sequence: list[int]) -> list[Proposal]:
            return [Proposal(8, 0, 1.0), Proposal(50, 1, 1.0)]

    lookup = CalibratedSource(PromptLookup(), Calibrator(), Calibrator(), leads=False)
    made = Drafter(CalibratedSource(Echo(), Calibrator(), Calibrator()), lookup, WIDTHS, Clock())
    made.begin(DraftTask((5, 6, 7, 8, 9, 5, 6, 7)), PLAN)
    made.step()
    asked = made._tree.children(ROOT)[8]
    looked_up = made._tree.children(asked)[9]
    before = made._states[looked_up].acceptance
    while not made._states[asked].evaluated:
        assert made.step()
    assert made._states[looked_up].acceptance < before / 2


def test_lookup_alone_makes_a_chain() -> None:
    prompt = (5, 6, 7, 8, 9, 10, 11, 5, 6, 7)
    lookup = CalibratedSource(PromptLookup(), Calibrator(), Calibrator())
    made = Drafter(None, lookup, DecodeLatency(((1, 1e-4),)), Clock())
    made.begin(DraftTask(prompt), PLAN)
    assert spine(grown(made))[:3] == [8, 9, 10]
    made.advance([8, 9])
    assert made._tree.position == 2 and len(made._tree) >= 1


def test_tokens_that_the_draft_does_not_know_are_never_evaluated() -> None:
    prompt = (500, 501, 502, 500, 501)
    lookup = CalibratedSource(PromptLookup(), Calibrator(), Calibrator(), leads=False)
    source = ScriptedSource()
    seen: list[int] = []
    source.expand = lambda spots, inner=source.expand: seen.extend(s.token for s in spots) or inner(spots)  # type: ignore
    made = Drafter(CalibratedSource(source, Calibrator(), Calibrator()), lookup, WIDTHS, Clock())
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


def evaluated(widths: DecodeLatency) -> tuple[Drafter, list[int]]:
    """Return the nodes in each decode of a grown drafter, for these decodes and a target's step of 30 ms."""
    source = ScriptedSource(0.5)
    sizes: list[int] = []
    inner = source.expand
    source.expand = lambda spots: sizes.append(len(spots)) or inner(spots)  # type: ignore[method-assign, func-returns-value]
    made = Drafter(CalibratedSource(source, Calibrator(), Calibrator()), None, widths, Clock())
    made.begin(DraftTask(PROMPT), SpeculationPlan(24, 8, 10, 0.12, 0.008, 0.030))
    while made.step():
        made.harvest(moved=True)
    return made, sizes


def test_a_phone_that_decodes_slowly_grows_a_comb_on_the_greedy_spine() -> None:
    made, sizes = evaluated(DecodeLatency(((1, 0.025), (8, 0.100))))
    ranked = {item.node.id: item for item in made._ranked()}
    parents = {item.node.parent for item in ranked.values()} - {ROOT}
    assert set(sizes) == {1} and len(sizes) >= 2
    assert parents and all(ranked[parent].spine for parent in parents)
    assert any(not item.spine for item in ranked.values())  # siblings, which cost no decode


def test_a_laptop_whose_decodes_cost_the_same_at_any_width_grows_best_first() -> None:
    made, sizes = evaluated(DecodeLatency(((1, 0.001), (8, 0.001))))
    ranked = {item.node.id: item for item in made._ranked()}
    parents = {item.node.parent for item in ranked.values()} - {ROOT}
    assert max(sizes) > 1
    assert any(not ranked[parent].spine for parent in parents)


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

    def knows(self, token: int) -> bool:
        return True


def forcing(forced: dict[int, int], widest: int = 8) -> tuple[Drafter, Forcing]:
    """Return a drafter with a perfect model beside which these tokens (key) force the next one (value)."""
    model = ScriptedSource(quality=1.0)
    source = Forcing(forced, model)
    made = Drafter(
        CalibratedSource(model, Calibrator(), Calibrator()),
        CalibratedSource(source, Calibrator(), Calibrator(), leads=False),
        DecodeLatency(((1, 1e-3), (widest, 1.2e-3))),
        Clock(),
    )
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


def test_tokens_that_must_follow_are_proposed_but_not_evaluated_where_the_draft_does_not_know_one() -> None:
    first = target(PROMPT)
    made, source = forcing({first: VOCABULARY + 3, VOCABULARY + 3: 91})
    growth = grown(made)
    assert spine(growth)[:3] == [first, VOCABULARY + 3, 91]
    assert not any(path[:1] == (first,) for call in source.calls for path in call)


def test_a_run_that_must_follow_counts_with_all_its_nodes_in_the_price_of_a_decode() -> None:
    leaves = [
        RankedNode(Node(1, ROOT, 5, 0), 1, 0.9, rows=7),
        RankedNode(Node(2, ROOT, 6, 0), 1, 0.8),
        RankedNode(Node(3, ROOT, 7, 0), 1, 0.7),
    ]
    flat, steep = DecodeLatency(((1, 1e-3), (8, 1e-3))), DecodeLatency(((1, 1e-3), (8, 8e-3)))
    assert [leaf.node.id for leaf in choose_leaves(leaves, PLAN, flat, 0.1)] == [1, 2]  # 8 rows are the widest
    assert [leaf.node.id for leaf in choose_leaves(leaves[1:], PLAN, flat, 0.1)] == [2, 3]
    assert [leaf.node.id for leaf in choose_leaves(leaves[1:], PLAN, steep, 0.1)] == [2]


def test_first_guesses_are_counted_once_the_target_has_spoken() -> None:
    health = DraftHealth()
    source = ScriptedSource(quality=1.0)
    made = Drafter(CalibratedSource(source, Calibrator(), Calibrator()), None, WIDTHS, health=health)
    made.begin(DraftTask(PROMPT), PLAN)
    assert made.step()
    right = target(PROMPT)
    made.advance([right])
    assert health.first_acceptance == FirstAcceptance(1, 1)
    made.advance([0])  # nobody had asked the draft what comes here
    assert health.first_acceptance == FirstAcceptance(1, 1)
    assert made.step()
    made.advance([(target((*PROMPT, right, 0)) + 1) % VOCABULARY])
    assert health.first_acceptance == FirstAcceptance(2, 1)
