"""Test the folder that heads come from, and how new ones are tried, kept or given up."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloud_verifier.distill.loop import canary_result
from cloud_verifier.engine.server_draft.base import EvaluatedRows, ProposalRequest, ProposedTree
from cloud_verifier.engine.server_draft.head_models import HeadsShape, new_heads, save_heads
from cloud_verifier.engine.server_draft.heads_folder import RELEASES, HeadsFolder
from cloud_verifier.engine.server_draft.heads_trial import (
    LEAST_GAIN,
    LEAST_SESSIONS,
    LEAST_STEPS,
    MOST_SESSIONS,
    POLL_S,
    Arm,
    ServedHeads,
    has_canary,
    verdict,
)
from outrider.core.errors import BadRequest, ModelRefused
from outrider.core.tree import ROOT

TARGET = "sha256:" + "a" * 64


def heads_file(path: Path, seed: int, target: str = TARGET) -> Path:
    save_heads(path, new_heads(HeadsShape(hidden=64, depth=1), seed), target)
    return path


def test_new_heads_are_the_canary_and_then_stable_or_rolled_back(tmp_path: Path) -> None:
    folder = HeadsFolder(tmp_path / "heads", TARGET)
    assert folder.releases() == () and folder.newest("stable") is None
    first = folder.add(heads_file(tmp_path / "1", 1))
    assert (first.state, first.version) == ("canary", 1) and folder.path(first.digest).is_file()
    assert folder.add(tmp_path / "1") == first
    stable = folder.decide(first.digest, "stable", "better")
    assert stable is not None and stable.reason == "better"
    assert folder.decide(first.digest, "rolled_back", "too late") is None
    second = folder.add(heads_file(tmp_path / "2", 2))
    folder.decide(second.digest, "rolled_back", "worse")
    third = folder.add(heads_file(tmp_path / "3", 3))
    folder.decide(third.digest, "stable", "better")
    assert [one.state for one in folder.releases()] == ["stable", "rolled_back", "superseded"]
    assert folder.newest("stable") == folder.releases()[0]


def test_a_newer_canary_takes_the_place_of_an_older_one_which_nobody_has_found_good(tmp_path: Path) -> None:
    folder = HeadsFolder(tmp_path / "heads", TARGET)
    folder.decide(folder.add(heads_file(tmp_path / "1", 1)).digest, "stable", "")
    second = folder.add(heads_file(tmp_path / "2", 2))
    third = folder.add(heads_file(tmp_path / "3", 3))
    assert [one.state for one in folder.releases()] == ["canary", "rolled_back", "stable"]
    assert folder.releases()[1].reason == f"heads {third.digest[:12]} came before it was decided"
    assert canary_result({one.digest: one for one in folder.releases()}, second.digest) == (  # type: ignore[arg-type]
        "rolled_back",
        folder.releases()[1].reason,
    )


def test_the_list_keeps_what_is_in_use_however_many_were_rolled_back(tmp_path: Path) -> None:
    folder, other = (HeadsFolder(tmp_path / "heads", "sha256:" + letter * 64) for letter in "ab")
    for one, name in ((folder, "a"), (other, "b")):
        one.decide(one.add(heads_file(tmp_path / name, 1, "sha256:" + name * 64)).digest, "stable", "")
    for seed in range(2, 60):
        folder.decide(folder.add(heads_file(tmp_path / "new", seed)).digest, "rolled_back", "worse")
    assert folder.newest("stable") is not None and other.newest("stable") is not None
    assert len(folder.releases()) == 51 and folder.releases()[0].version == 60


def test_a_folder_takes_no_heads_of_another_target_and_shows_none(tmp_path: Path) -> None:
    folder, other = HeadsFolder(tmp_path / "heads", TARGET), HeadsFolder(tmp_path / "heads", "sha256:" + "b" * 64)
    folder.add(heads_file(tmp_path / "1", 1))
    assert other.releases() == ()
    with pytest.raises(ModelRefused, match="this folder's are of sha256:bbbb"):
        other.add(tmp_path / "1")


def test_a_folder_takes_no_damaged_heads(tmp_path: Path) -> None:
    heads = new_heads(HeadsShape(hidden=64, depth=1))
    next(heads.parameters()).data.fill_(float("nan"))
    save_heads(tmp_path / "1", heads, TARGET)
    folder = HeadsFolder(tmp_path / "heads", TARGET)
    with pytest.raises(ModelRefused, match="not finite"):
        folder.add(tmp_path / "1")
    assert folder.releases() == ()


def test_a_damaged_list_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / RELEASES).write_text('{"releases": [{"digest": "../../etc"}]}')
    with pytest.raises(ModelRefused, match=r"heads\.json cannot be read"):
        HeadsFolder(tmp_path, TARGET).releases()


def arm(means: Sequence[float]) -> Arm:
    made = Arm()
    for mean in means:
        made.add(mean)
    return made


def test_equal_heads_become_stable_and_far_worse_ones_are_rolled_back_early() -> None:
    rng = random.Random(0)
    stable = [rng.gauss(1.2, 0.3) for _ in range(MOST_SESSIONS)]
    assert verdict(arm(stable[: LEAST_SESSIONS - 1]), arm(stable)) is None
    assert verdict(arm(stable[:20]), arm(stable)) is None
    assert verdict(arm(stable), arm(stable)) == "stable"
    assert verdict(arm([one - 0.6 for one in stable[:LEAST_SESSIONS]]), arm(stable)) == "rolled_back"
    assert verdict(arm([0.0] * LEAST_SESSIONS), arm([0.0] * LEAST_SESSIONS)) == "rolled_back"


def test_first_heads_must_gain_enough_and_are_given_up_early_only_with_confidence() -> None:
    without = arm([0.0] * MOST_SESSIONS)
    assert verdict(arm([0.8 * LEAST_GAIN, LEAST_GAIN] * (MOST_SESSIONS // 2)), without) == "rolled_back"
    unlucky, better = [0.0] * (LEAST_SESSIONS - 1) + [LEAST_GAIN], [6 * LEAST_GAIN, 0.0] * (MOST_SESSIONS // 2)
    assert verdict(arm(unlucky), without) == "rolled_back"
    assert verdict(arm([0.0] * (LEAST_SESSIONS - 1) + [8 * LEAST_GAIN]), without) is None
    assert verdict(arm(better), without) == "stable"


def test_hardly_any_equal_heads_are_rolled_back_by_chance() -> None:
    rolled_back = 0
    for seed in range(200):
        rng = random.Random(seed)
        canary, stable = Arm(), Arm()
        result = None
        while result is None:
            for one in (canary, stable, stable, stable):
                one.add(rng.gauss(1.2, 0.4))
            result = verdict(canary, stable)
        rolled_back += result == "rolled_back"
    assert rolled_back <= 12  # of 28 looks each


class FakeHeads:
    """Propose the right next token in a share of the steps."""

    def __init__(self, share: float) -> None:
        self.share, self.rng, self.fails = share, random.Random(1), False
        self.sessions: set[str] = set()

    def observe(self, session: Any, rows: EvaluatedRows) -> None:
        self.sessions.add(session.session_id)

    def propose(self, requests: Sequence[ProposalRequest]) -> Mapping[str, ProposedTree]:
        if self.fails:
            raise RuntimeError("shapes differ")
        found = {}
        for request in requests:
            tree = ProposedTree(0)
            tree.propose(ROOT, 5 if self.rng.random() < self.share else 6, 0)
            found[request.session.session_id] = tree
        return found

    def release(self, session_id: str) -> None:
        self.sessions.discard(session_id)


class World:
    """Serve the heads of a folder to sessions whose next token is always 5."""

    def __init__(self, root: Path, **shares: float) -> None:
        self.folder, self.now = HeadsFolder(root / "heads", TARGET), 0.0
        self.made: dict[str, FakeHeads] = {}
        self.shares: dict[str, float] = {}
        self.digests: dict[str, str] = {}
        for seed, (name, share) in enumerate(shares.items()):
            self.digests[name] = self.folder.add(heads_file(root / name, seed)).digest
            self.shares[self.digests[name]] = share
            if name == "stable":
                self.folder.decide(self.digests[name], "stable", "")
        self.served = self.serve()
        self.count = 0

    def serve(self) -> ServedHeads:
        return ServedHeads(self.folder, self.load, clock=lambda: self.now)

    def load(self, path: Path) -> Any:
        made = self.made[path.stem] = FakeHeads(self.shares[path.stem])
        return made

    def session(self, steps: int = LEAST_STEPS + 2) -> None:
        self.count += 1
        session: Any = SimpleNamespace(session_id=f"session {self.count}", tokens=[1, 2, 3])
        for _ in range(steps):
            self.step(session)
        self.served.release(session.session_id)

    def trying(self) -> Any:
        """Return a new session that is one of those with the canary."""
        self.count += 1
        while not has_canary(f"session {self.count}"):
            self.count += 1
        return SimpleNamespace(session_id=f"session {self.count}", tokens=[1, 2, 3])

    def step(self, session: Any) -> bool:
        """Take a step of a session; return whether it got a proposal."""
        self.served.observe(session, EvaluatedRows([0], 1))
        found = self.served.propose([ProposalRequest(session, 4, 0.0, SimpleNamespace())])  # type: ignore[arg-type]
        session.tokens = [*session.tokens, 5]
        return session.session_id in found

    def add(self, name: str, share: float = 1.0) -> str:
        """Make new heads the folder's canary; return their digest."""
        digest = self.folder.add(heads_file(self.folder.path("").parent / name, 100 + len(self.digests))).digest
        self.digests[name], self.shares[digest] = digest, share
        return digest

    def state(self, name: str) -> str:
        return next(one.state for one in self.folder.releases() if one.digest == self.digests[name])

    def decided(self, name: str) -> int:
        """Run sessions until it is decided about heads; return how many."""
        while self.state(name) == "canary":
            self.session()
            assert self.count < 2_000
        return self.count


def test_a_better_canary_becomes_stable_and_serves_every_session(tmp_path: Path) -> None:
    world = World(tmp_path, stable=0.5, canary=0.7)
    world.decided("canary")
    assert (world.state("canary"), world.state("stable")) == ("stable", "superseded")
    before = len(world.made)
    world.session()
    assert len(world.made) == before and not any(one.sessions for one in world.made.values())
    assert world.serve() is not None and world.folder.newest("stable") is not None


def test_a_worse_canary_is_rolled_back_early_and_the_others_go_on(tmp_path: Path) -> None:
    world = World(tmp_path, stable=0.8, canary=0.3)
    assert world.decided("canary") < 4 * MOST_SESSIONS
    assert (world.state("canary"), world.state("stable")) == ("rolled_back", "stable")


def test_the_first_heads_of_a_target_are_tried_beside_sessions_without_any(tmp_path: Path) -> None:
    world = World(tmp_path, canary=0.5)
    world.decided("canary")
    assert world.state("canary") == "stable"
    (tmp_path / "other").mkdir()
    useless = World(tmp_path / "other", canary=0.003)
    useless.decided("canary")
    assert useless.state("canary") == "rolled_back"


def test_a_canary_that_raises_is_rolled_back_at_once_and_nobody_fails(tmp_path: Path) -> None:
    world = World(tmp_path, stable=0.5, canary=0.5)
    world.made[world.digests["canary"]].fails = True
    while not has_canary(f"session {world.count}"):
        world.session()
    assert world.state("canary") == "rolled_back"
    world.session()


def test_a_canary_that_cannot_be_loaded_is_rolled_back_and_keeps_nobody_from_starting(tmp_path: Path) -> None:
    world = World(tmp_path, stable=0.5)
    load = world.load

    def refuse(path: Path) -> Any:
        if path.stem == world.digests["stable"]:
            return load(path)
        raise RuntimeError("out of memory")

    world.load = refuse  # type: ignore[method-assign]
    world.digests["canary"] = world.folder.add(heads_file(tmp_path / "canary", 7)).digest
    started = world.serve()
    assert world.state("canary") == "rolled_back" and "out of memory" in world.folder.releases()[0].reason
    assert started._stable is not None
    world.now += POLL_S
    world.session()  # the verifier that had started before goes on with the stable heads
    assert world.served._stable is not None and world.served._canary is None


def test_a_verifier_says_which_stable_heads_it_cannot_load_and_starts_without_their_file(tmp_path: Path) -> None:
    world = World(tmp_path, stable=1.0)

    def refuse(path: Path) -> Any:
        raise RuntimeError("CUDA out of memory")

    world.load = refuse  # type: ignore[method-assign]
    digest = world.digests["stable"]
    with pytest.raises(ModelRefused, match=rf"{digest}\.safetensors cannot be loaded \(RuntimeError: CUDA out of"):
        world.serve()
    world.folder.path(digest).unlink()
    world.serve()


def test_heads_that_another_verifier_found_good_are_blamed_for_themselves_alone(tmp_path: Path) -> None:
    world = World(tmp_path, canary=1.0)
    session = world.trying()
    assert world.step(session)
    world.folder.decide(world.digests["canary"], "stable", "better elsewhere")
    world.add("newer")
    world.now += POLL_S
    assert world.step(session), "the session keeps its heads"
    world.made[world.digests["canary"]].fails = True
    with pytest.raises(RuntimeError):
        world.step(session)
    assert (world.state("newer"), world.state("canary")) == ("canary", "stable")


def test_a_session_whose_canary_was_replaced_counts_in_no_trial(tmp_path: Path) -> None:
    world = World(tmp_path, stable=1.0, canary=1.0)
    session = world.trying()
    for _ in range(LEAST_STEPS):
        world.step(session)
    world.add("newer")
    world.now += POLL_S
    assert not world.step(session) and not world.step(session)
    world.served.release(session.session_id)
    assert world.served._trial.stable.sessions == world.served._trial.canary.sessions == 0


def test_a_canary_that_is_gone_is_given_up_though_the_new_stable_heads_cannot_be_loaded(tmp_path: Path) -> None:
    world = World(tmp_path, stable=1.0, canary=1.0)
    session = world.trying()
    assert world.step(session)
    world.folder.decide(world.add("newer"), "stable", "better elsewhere")
    world.shares.clear()  # nothing can be loaded any more
    world.now += POLL_S
    assert not world.step(session)
    assert world.served._canary is None and world.served._stable is not None


def test_heads_that_another_verifier_has_rolled_back_are_given_up_in_mid_session(tmp_path: Path) -> None:
    world = World(tmp_path, canary=0.9)
    name = next(f"s{i}" for i in range(99) if has_canary(f"s{i}"))
    session: Any = SimpleNamespace(session_id=name, tokens=[1, 2, 3])

    def proposed() -> int:
        world.served.observe(session, EvaluatedRows([0], 1))
        return len(world.served.propose([ProposalRequest(session, 4, 0.0, SimpleNamespace())]))  # type: ignore[arg-type]

    assert proposed() == 1
    world.folder.decide(world.digests["canary"], "rolled_back", "worse elsewhere")
    world.now += POLL_S
    proposed()
    assert proposed() == 0


def test_a_decision_of_another_verifier_stands(tmp_path: Path) -> None:
    world = World(tmp_path, canary=0.9)
    world.folder.decide(world.digests["canary"], "rolled_back", "worse elsewhere")
    for _ in range(8 * MOST_SESSIONS):  # this verifier would decide otherwise, and has not looked
        world.session()
    assert world.state("canary") == "rolled_back"
    assert world.served._stable is None and world.served._canary is None


def test_heads_that_are_stable_for_this_verifier_alone_are_given_up_once_another_rolls_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, canary=1.0)

    def refuse(*given: Any) -> None:
        raise OSError("the file system is read-only")

    with monkeypatch.context() as patched:
        patched.setattr(world.folder, "decide", refuse)
        while world.served._stable is None:
            world.session()
    session = world.trying()
    assert world.step(session)
    world.folder.decide(world.digests["canary"], "rolled_back", "worse elsewhere")
    world.now += POLL_S
    assert not world.step(session) and not world.step(world.trying())


def test_what_a_session_is_to_blame_for_does_not_roll_a_canary_back(tmp_path: Path) -> None:
    world = World(tmp_path, stable=0.5, canary=0.5)

    def refuse(session: Any, rows: EvaluatedRows) -> None:
        raise BadRequest("the grammar cannot be followed", field="grammar")

    world.made[world.digests["canary"]].observe = refuse  # type: ignore[method-assign]
    with pytest.raises(BadRequest):
        while world.count < 100:
            world.session()
    assert world.state("canary") == "canary"


def test_heads_that_come_while_sessions_run_are_found(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.session()
    digest = world.folder.add(heads_file(tmp_path / "new", 9)).digest
    world.shares[digest] = 1.0
    world.session()
    assert digest not in world.made
    world.now += POLL_S
    world.session()
    assert digest in world.made
