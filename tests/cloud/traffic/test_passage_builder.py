"""Test that steps become passages without the tokens that an operator's hook finds."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from passages import NOW, contents, passage, same

from cloud_verifier.traffic.passage import Passage
from cloud_verifier.traffic.passage_builder import (
    QUIET_S,
    PassageBuilder,
    RecordingCounts,
    Redact,
    load_hook,
)
from outrider.core.errors import BadRequest

SECRET = (41, 42, 43)
TEXTS = st.lists(st.sampled_from([(1,), (1,) * 9, SECRET, SECRET[:2]])).map(lambda parts: [t for p in parts for t in p])
STEPS = st.integers(1, 4) | st.integers(1, 90)


def secret(tokens: np.ndarray, traffic_class: str, tenant: str) -> np.ndarray:
    """Hide the secret wherever it occurs whole."""
    mask = np.zeros(len(tokens), dtype=bool)
    for at in range(len(tokens) - len(SECRET) + 1):
        if tuple(tokens[at : at + len(SECRET)]) == SECRET:
            mask[at : at + len(SECRET)] = True
    return mask


def builder(redact: Redact | None = None, prompt_tokens: int = 0) -> tuple[PassageBuilder, RecordingCounts]:
    counts = RecordingCounts()
    return PassageBuilder(redact, counts, prompt_tokens), counts


def text(tokens: list[int], **changes: Any) -> Passage:
    return passage(len(tokens), tokens=np.array(tokens, dtype=np.int32), **changes)


def test_the_steps_of_a_session_are_one_passage_and_each_session_has_its_own() -> None:
    gathered, _ = builder()
    whole = passage(9)
    for piece in (whole.cut(0, 2), passage(3, session_id="t"), whole.cut(2, 3), whole.cut(3, 9)):
        gathered.add(piece)
    assert gathered.tokens == 12
    cut = sorted(gathered.take(NOW), key=lambda one: one.session_id)
    assert same(cut[0], whole)
    assert contents(cut[1:]) == contents([passage(3, session_id="t")])
    assert gathered.tokens == 0
    assert list(gathered.take(NOW)) == []


def test_a_gap_or_another_draft_begins_another_passage() -> None:
    gathered, _ = builder()
    pieces = [passage(2), passage(2, start=5), passage(2, start=7, draft_release="new")]
    for piece in pieces:
        gathered.add(piece)
    assert contents(list(gathered.take(NOW))) == contents(pieces)


@given(TEXTS, st.data())
def test_what_the_hook_finds_is_never_written_wherever_the_text_is_cut_and_drafts_change(
    tokens: list[int], data: st.DataObject
) -> None:
    gathered, counts = builder(secret)
    written: list[Passage] = []
    drafts: list[str] = []
    while len(drafts) < len(tokens):
        step = data.draw(STEPS)
        draft, keep_s = data.draw(st.sampled_from(["r1", "r2"])), data.draw(st.sampled_from([60.0, 60.5]))  # an epoch
        at = len(drafts)
        gathered.add(text(tokens[at : at + step], start=at, draft_release=draft, expires_unix=NOW + keep_s))
        drafts += [draft] * len(tokens[at : at + step])
        for _ in range(data.draw(st.integers(0, 3))):  # now and then it pauses
            written += gathered.take(NOW + QUIET_S - 1)
    written += gathered.take(NOW, final=True)
    hidden = secret(np.array(tokens), "", "")
    kept = {i: (token, drafts[i]) for i, token in enumerate(tokens) if not hidden[i]}
    assert {p.start + i: (int(t), p.draft_release) for p in written for i, t in enumerate(p.tokens)} == kept
    assert sum(len(p) for p in written) == len(kept)
    assert counts.redacted == hidden.sum()


@given(
    st.lists(st.sampled_from([1, 2, *SECRET, *SECRET]), max_size=60),
    st.lists(st.sampled_from([1, 2, *SECRET, *SECRET]), min_size=1, max_size=80),
    st.integers(0, 70),
    st.data(),
)
def test_what_the_hook_finds_in_a_prompt_is_never_written_nor_what_precedes_it(
    prompt: list[int], tokens: list[int], most: int, data: st.DataObject
) -> None:
    gathered, counts = builder(secret, prompt_tokens=most)
    written: list[Passage] = []
    at = 0
    while at < len(tokens):
        step, draft = data.draw(st.integers(1, 40)), data.draw(st.sampled_from(["r1", "r2"]))
        ahead = np.array([] if at else prompt, dtype=np.int32)
        gathered.add(text(tokens[at : at + step], start=at, prompt=ahead, draft_release=draft))
        at += step
        written += gathered.take(NOW)
    written += gathered.take(NOW, final=True)
    hidden = secret(np.array([*prompt, *tokens]), "", "")
    clean = len(prompt) - max((i + 1 for i in range(len(prompt)) if hidden[i]), default=0)
    begun = [one.prompt.tolist() for one in written if one.start == 0]
    assert begun == ([] if hidden[len(prompt)] else [prompt[len(prompt) - min(clean, most) :]])
    assert all(len(one.prompt) == 0 for one in written if one.start)
    kept = {i: token for i, token in enumerate(tokens) if not hidden[len(prompt) + i]}
    assert {p.start + i: int(t) for p in written for i, t in enumerate(p.tokens)} == kept
    assert counts.redacted == hidden[len(prompt) :].sum()


@pytest.mark.parametrize("wrong", ["raises", [True], np.zeros((4, 1), bool), np.zeros(4), None])
def test_a_passage_on_which_the_hook_fails_is_not_recorded_and_counted(
    wrong: object, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(tokens: np.ndarray, traffic_class: str, tenant: str) -> object:
        if wrong == "raises":
            raise RuntimeError("out of order")
        return wrong

    gathered, counts = builder(failing)
    gathered.add(passage(4))
    with caplog.at_level(logging.WARNING):
        assert list(gathered.take(NOW, final=True)) == []
    assert counts == RecordingCounts(refused=4)
    assert "4 tokens are not recorded" in caplog.text


def test_a_hook_is_found_by_its_name_or_refused_by_it() -> None:
    assert load_hook(f"{__name__}:secret") is secret
    for name in ("nosuchmodule:f", f"{__name__}:nosuch", f"{__name__}:SECRET", "json"):
        with pytest.raises(BadRequest, match="traffic_redact is"):
            load_hook(name)
