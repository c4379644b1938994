"""Test the token tree against a model that knows only whole sequences."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.tree import ROOT, TokenTree

# (parent among those there, token) adds a node; a list of tokens commits them.
ADD = st.tuples(st.integers(0, 30), st.integers(0, 2))
COMMIT = st.lists(st.integers(0, 2), max_size=3)
SCRIPTS = st.lists(st.one_of(ADD, ADD, ADD, COMMIT), max_size=30)


class Model:
    """Hold nodes as the whole sequences that they stand for."""

    def __init__(self, position: int) -> None:
        self.committed: tuple[int, ...] = (7,) * position
        self.nodes: dict[int, tuple[int, ...]] = {}
        self.next_id = 1

    def sequence(self, node_id: int) -> tuple[int, ...]:
        return self.committed if node_id == ROOT else self.nodes[node_id]

    def commit(self, tokens: list[int]) -> list[int]:
        carried: list[int] = []
        for token in tokens:
            self.committed = (*self.committed, token)
            carried += [node_id for node_id, whole in self.nodes.items() if whole == self.committed]
            size = len(self.committed)
            self.nodes = {
                i: whole for i, whole in self.nodes.items() if whole[:size] == self.committed and len(whole) > size
            }
        return carried


def run_script(script: list[tuple[int, int] | list[int]], position: int) -> tuple[TokenTree, Model]:
    tree, model = TokenTree(position), Model(position)
    for move in script:
        if isinstance(move, list):
            assert tree.advance(move) == model.commit(move)
            continue
        choice, token = move
        places = [ROOT, *model.nodes]
        parent = places[choice % len(places)]
        if tree.child(parent, token) is None:
            node = tree.add(model.next_id, parent, token)
            model.nodes[model.next_id] = (*model.sequence(parent), token)
            assert (node.id, node.token, node.position) == (model.next_id, token, len(model.sequence(parent)))
            model.next_id += 1
    return tree, model


@settings(max_examples=300)
@given(SCRIPTS, st.integers(0, 3))
def test_the_tree_holds_just_what_extends_the_committed_sequence(script: list, position: int) -> None:
    tree, model = run_script(script, position)
    assert {node.id: (*model.committed, *tree.path(node.id)) for node in tree} == model.nodes
    assert len(tree) == len(model.nodes)
    assert tree.position == len(model.committed)
    assert all((node_id in tree) == (node_id in model.nodes) for node_id in range(1, model.next_id))
    order = [node.id for node in tree]
    assert order == sorted(order)


@settings(max_examples=300)
@given(SCRIPTS, st.integers(0, 3))
def test_positions_depths_and_children_agree_with_the_paths(script: list, position: int) -> None:
    tree, model = run_script(script, position)
    assert tree.path(ROOT) == []
    assert tree.depth(ROOT) == 0
    assert tree.position_under(ROOT) == tree.position
    for node in tree:
        whole = model.nodes[node.id]
        assert node.position == len(whole) - 1
        assert tree.position_under(node.id) == len(whole)
        assert tree.depth(node.id) == len(tree.path(node.id)) == len(whole) - len(model.committed)
    for parent in [ROOT, *model.nodes]:
        below = {whole[-1]: node_id for node_id, whole in model.nodes.items() if whole[:-1] == model.sequence(parent)}
        assert tree.children(parent) == below
        assert all(tree[node_id].parent == parent for node_id in below.values())
        assert all(tree.child(parent, token) == below.get(token) for token in range(4))
