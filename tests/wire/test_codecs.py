"""Test that codecs return what they were given, and refuse values out of bounds by field, value and bound."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import fields, replace
from types import NoneType
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import BadRequest
from outrider.core.protocol.messages import (
    MAX_APPEND_NODES,
    MAX_GENERATED_TOKENS,
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    MAX_PROMPT_TOKENS,
    MAX_SESSION_ID,
    MAX_STOP_TOKENS,
    MAX_VERIFIER_ID,
    MAX_VOCABULARY,
    Append,
    Attach,
    Cancel,
    Commit,
    Directive,
    Finish,
    SessionLimits,
    TokenLogprobs,
)
from outrider.core.sampling import MAX_DELTA, SamplingParams, TypicalAcceptance
from outrider.wire import codecs
from outrider.wire.codecs import MAX_HASH_BYTES, Open, Opened
from outrider.wire.v1 import session_pb2 as pb

VOCABULARY = 1000

ids = st.integers(0, VOCABULARY - 1)
epochs = st.integers(1, 2**63 - 1)
caps = st.integers(0, 65_536)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
printable = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=MAX_SESSION_ID)
verifier_ids = st.text(st.characters(categories=("L", "N", "P")), max_size=MAX_VERIFIER_ID)

sampling = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(1e-3, 100.0),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.floats(0.01, 100.0),
    presence_penalty=st.floats(-100.0, 100.0),
    frequency_penalty=st.floats(-100.0, 100.0),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(ids, st.floats(-100.0, 100.0), max_size=5).map(lambda found: tuple(found.items())),
    typical=st.none()
    | st.builds(TypicalAcceptance, st.floats(0.0, 1.0, exclude_min=True), st.floats(0.0, MAX_DELTA, exclude_min=True)),
)
attaches = st.builds(
    Attach,
    epoch=epochs,
    prompt=st.lists(ids, min_size=1, max_size=20).map(tuple),
    tokens=st.lists(ids, max_size=20).map(tuple),
    sampling=sampling,
    max_tokens=st.integers(20, MAX_GENERATED_TOKENS),
    stop_token_ids=st.lists(ids, max_size=MAX_STOP_TOKENS).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
)
scoring = st.builds(
    lambda attach, top, scored, none: replace(
        attach,
        prompt_logprobs=top,
        tokens=() if scored or none else attach.tokens,
        scored=0 if none else max(0, len(attach.prompt) - 1 - scored),
        max_tokens=0 if none else attach.max_tokens,
    ),
    attaches,
    st.integers(0, MAX_LOGPROBS),
    st.integers(0, 1),
    st.booleans(),
)
limits = st.builds(SessionLimits, caps, caps, caps, st.integers(1, 65_536))
steps_ms = st.just(0.0) | st.floats(1e-3, 1e6)
directives = st.builds(Directive, caps, caps, caps, st.floats(0.0, 1.0), st.integers(0, 60_000), steps_ms)
commits = st.builds(
    Commit,
    epoch=epochs,
    start=st.integers(0, MAX_GENERATED_TOKENS - 20),
    tokens=st.lists(ids, max_size=20).map(tuple),
    seen=st.integers(0, 2**63 - 1),
    finish=st.sampled_from(Finish),
    evaluated=caps,
)
log_probs = st.floats(-1e4, 0.0, width=32)


@st.composite
def commits_with_logprobs(draw: st.DrawFn) -> Commit:
    """Draw a commit with log-probabilities."""
    commit, each = draw(commits), draw(st.integers(0, MAX_LOGPROBS))
    top = st.lists(st.tuples(ids, log_probs), min_size=each, max_size=each).map(tuple)
    one = st.builds(TokenLogprobs, log_probs, top)
    scores = tuple(draw(st.lists(one, max_size=20)))
    return replace(
        commit,
        logprobs=tuple(draw(one) for _ in commit.tokens),
        scored=draw(st.integers(0, MAX_PROMPT_TOKENS)),
        prompt_logprobs=scores,
    )


@st.composite
def appends(draw: st.DrawFn) -> Append:
    first = draw(st.integers(1, 2**62))
    tokens = draw(st.lists(ids, max_size=20))
    parents = tuple(draw(st.integers(0, first + i - 1)) for i in range(len(tokens)))
    base = draw(st.integers(0, MAX_GENERATED_TOKENS))
    return Append(draw(epochs), first, base, parents, tuple(tokens), draw(st.booleans()))


opens = st.builds(
    Open,
    session_id=printable,
    attach=attaches | scoring,
    vocabulary_hash=st.binary(max_size=MAX_HASH_BYTES),
)
openeds = st.builds(Opened, epochs, verifier_ids, limits, directives, st.integers(0, MAX_VOCABULARY))


def attach_from(message: pb.Attach) -> Attach:
    return codecs.attach_from_proto(message, vocabulary_size=VOCABULARY)


def append_from(message: pb.Append, epoch: int = 1) -> Append:
    """Decode as front and engine process do: the first checks, the second builds."""
    codecs.check_append(message, vocabulary_size=VOCABULARY)
    return codecs.append_from_checked(message, epoch=epoch)


def commit_from(message: pb.Commit) -> Commit:
    return codecs.commit_from_proto(message, vocabulary_size=VOCABULARY)


def open_from(message: pb.Open) -> Open:
    return codecs.open_from_proto(message, vocabulary_size=VOCABULARY)


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


# --- what goes out comes in


@given(sampling)
def test_sampling_survives(value):
    assert codecs.sampling_from_proto(over_the_wire(codecs.sampling_to_proto(value))) == value


@given(attaches)
def test_an_attach_survives(value):
    assert attach_from(over_the_wire(codecs.attach_to_proto(value))) == value


@given(appends())
def test_an_append_survives(value):
    assert append_from(over_the_wire(codecs.append_to_proto(value)), value.epoch) == value


@given(commits | commits_with_logprobs())
def test_a_commit_survives(value):
    assert codecs.commit_from_proto(over_the_wire(codecs.commit_to_proto(value))) == value


@given(epochs)
def test_a_cancel_survives(epoch):
    assert codecs.cancel_from_proto(over_the_wire(codecs.cancel_to_proto(Cancel(epoch)))) == Cancel(epoch)


@given(limits)
def test_limits_survive(value):
    assert codecs.limits_from_proto(over_the_wire(codecs.limits_to_proto(value))) == value


@given(directives)
def test_a_directive_survives(value):
    assert codecs.directive_from_proto(over_the_wire(codecs.directive_to_proto(value))) == value


@given(st.builds(codecs.Ping, st.integers(0, 2**64 - 1), st.floats(0.0, 1e6)))
def test_a_ping_survives(value):
    assert codecs.ping_from_proto(over_the_wire(codecs.ping_to_proto(value))) == value


@given(opens)
def test_an_open_survives(value):
    assert open_from(over_the_wire(codecs.open_to_proto(value))) == value


@given(openeds)
def test_an_opened_survives(value):
    assert codecs.opened_from_proto(over_the_wire(codecs.opened_to_proto(value))) == value


def test_every_finish_has_a_name_on_the_wire():
    assert {finish.value for finish in Finish} == set(pb.Finish.values())


def test_every_field_of_our_messages_is_on_the_wire_and_the_other_way_round():
    """A field added on one side alone would be lost in silence."""
    for ours, theirs in [
        (Attach, pb.Attach),
        (Commit, pb.Commit),
        (SessionLimits, pb.SessionLimits),
        (Directive, pb.Directive),
        (SamplingParams, pb.Sampling),
        (codecs.Ping, pb.Ping),
        (Open, pb.Open),
        (Opened, pb.Opened),
    ]:
        # Both of the fields about the prompt are in one message.
        of_commit = {"tokens": "token", "logprobs": "logprob", "scored": "prompt", "prompt_logprobs": "prompt"}
        singular = of_commit if ours is Commit else {"logit_bias": "bias"}
        flat = {"bias_id", "top_id", "top_logprob"}  # what stands beside another field of the wire, of the same length
        assert {singular.get(f.name, f.name) for f in fields(ours)} == set(theirs.DESCRIPTOR.fields_by_name) - flat
    # The epoch of an Append is its stream's, and parents are given by their distance from their children.
    names = {"tokens": "token", "parents": "up"}
    ours_of_append = {names.get(f.name, f.name) for f in fields(Append)} - {"epoch"}
    assert ours_of_append == set(pb.Append.DESCRIPTOR.fields_by_name)


# --- bounds


def good_attach(**changes: Any) -> pb.Attach:
    given = {"epoch": 1, "prompt": [1], "max_tokens": 8, **changes}
    sampled = given.pop("sampling", pb.Sampling(top_p=1.0, repetition_penalty=1.0))
    return pb.Attach(sampling=sampled, **given)


def good_append(**changes: Any) -> pb.Append:
    return pb.Append(**{"first_id": 1, **changes})


def good_open(**changes: Any) -> pb.Open:
    return pb.Open(**{"session_id": "s", "attach": good_attach(), **changes})


def good_commit(**changes: Any) -> pb.Commit:
    return pb.Commit(**{"epoch": 1, **changes})


def good_opened(**changes: Any) -> pb.Opened:
    return pb.Opened(**{"epoch": 1, "limits": good_limits(), **changes})


def good_limits(**changes: Any) -> pb.SessionLimits:
    return pb.SessionLimits(**{"run_ahead": 1, **changes})


def sampled(**changes: Any) -> pb.Attach:
    return good_attach(sampling=pb.Sampling(**{"top_p": 1.0, "repetition_penalty": 1.0, **changes}))


TOP_EPOCH = 2**63 - 1
REFUSED: list[tuple[Callable[[Any], object], Any, str, object, str]] = [
    (attach_from, good_attach(epoch=0), "attach.epoch", 0, f"between 1 and {TOP_EPOCH}"),
    (attach_from, good_attach(epoch=2**63), "attach.epoch", 2**63, f"between 1 and {TOP_EPOCH}"),
    (attach_from, good_attach(prompt=[]), "length of attach.prompt", 0, f"between 1 and {MAX_PROMPT_TOKENS}"),
    (
        attach_from,
        good_attach(prompt=[1] * (MAX_PROMPT_TOKENS + 1)),
        "length of attach.prompt",
        MAX_PROMPT_TOKENS + 1,
        f"between 1 and {MAX_PROMPT_TOKENS}",
    ),
    (attach_from, good_attach(prompt=[1, VOCABULARY]), "attach.prompt", VOCABULARY, f"less than {VOCABULARY}"),
    (attach_from, good_attach(max_tokens=0), "attach.max_tokens", 0, f"between 1 and {MAX_GENERATED_TOKENS}"),
    (
        attach_from,
        good_attach(max_tokens=MAX_GENERATED_TOKENS + 1),
        "attach.max_tokens",
        MAX_GENERATED_TOKENS + 1,
        f"between 1 and {MAX_GENERATED_TOKENS}",
    ),
    (attach_from, good_attach(tokens=[1] * 9), "length of attach.tokens", 9, "between 0 and 8"),
    (attach_from, good_attach(tokens=[2**32 - 1]), "attach.tokens", 2**32 - 1, f"less than {VOCABULARY}"),
    (
        attach_from,
        good_attach(stop_token_ids=[1] * 65),
        "length of attach.stop_token_ids",
        65,
        f"between 0 and {MAX_STOP_TOKENS}",
    ),
    (attach_from, good_attach(stop_token_ids=[1000]), "attach.stop_token_ids", 1000, f"less than {VOCABULARY}"),
    (attach_from, sampled(temperature=-1.0), "temperature", -1.0, "between 0"),
    (attach_from, sampled(temperature=math.nan), "temperature", "nan", "between 0"),
    (attach_from, sampled(temperature=math.inf), "temperature", "inf", "between 0"),
    (attach_from, sampled(temperature=1e-4), "temperature", 0.0001, "0 (greedy) or at least 0.001"),
    (attach_from, sampled(top_k=2**31), "top_k", 2**31, "between 0"),
    (attach_from, sampled(top_p=1.5), "top_p", 1.5, "between 0"),
    (attach_from, sampled(top_p=0.0), "top_p", 0.0, "greater than 0"),
    (attach_from, sampled(top_p=math.nan), "top_p", "nan", "between 0"),
    (attach_from, sampled(min_p=-0.5), "min_p", -0.5, "between 0"),
    (attach_from, sampled(repetition_penalty=0.0), "repetition_penalty", 0.0, "between 0.01"),
    (attach_from, sampled(presence_penalty=101.0), "presence_penalty", 101.0, "between -100"),
    (attach_from, sampled(frequency_penalty=-math.inf), "frequency_penalty", "-inf", "between -100"),
    (append_from, good_append(first_id=0), "append.first_id", 0, f"between 1 and {TOP_EPOCH - MAX_APPEND_NODES}"),
    (
        append_from,
        good_append(first_id=2**64 - 1),
        "append.first_id",
        2**64 - 1,
        f"between 1 and {TOP_EPOCH - MAX_APPEND_NODES}",
    ),
    (
        append_from,
        good_append(base=MAX_GENERATED_TOKENS + 1),
        "append.base",
        MAX_GENERATED_TOKENS + 1,
        f"between 0 and {MAX_GENERATED_TOKENS}",
    ),
    (
        append_from,
        good_append(token=[1] * 1025, up=[0] * 1025),
        "nodes in append.token",
        1025,
        f"between 0 and {MAX_APPEND_NODES}",
    ),
    (append_from, good_append(token=[1, 2], up=[0]), "length of append.up", 1, "2, the length of append.token"),
    (append_from, good_append(up=[0]), "length of append.up", 1, "0, the length of append.token"),
    (append_from, good_append(token=[1], up=[1]), "append.up[0]", 1, "less than 1"),
    (
        append_from,
        good_append(first_id=5, token=[1, 2], up=[0, 6]),
        "append.up[1]",
        6,
        "less than 6",
    ),
    (append_from, good_append(token=[1000], up=[0]), "append.token", 1000, f"less than {VOCABULARY}"),
    (codecs.ping_from_proto, pb.Ping(rtt_ms=-1.0), "ping.rtt_ms", -1.0, "between 0"),
    (codecs.ping_from_proto, pb.Ping(rtt_ms=math.nan), "ping.rtt_ms", "nan", "between 0"),
    (codecs.cancel_from_proto, pb.Cancel(), "cancel.epoch", 0, f"between 1 and {TOP_EPOCH}"),
    (
        codecs.commit_from_proto,
        good_commit(start=MAX_GENERATED_TOKENS + 1),
        "commit.start",
        MAX_GENERATED_TOKENS + 1,
        f"between 0 and {MAX_GENERATED_TOKENS}",
    ),
    (
        codecs.commit_from_proto,
        good_commit(token=[1] * (MAX_GENERATED_TOKENS + 1)),
        "tokens in commit.token",
        MAX_GENERATED_TOKENS + 1,
        f"between 0 and {MAX_GENERATED_TOKENS}",
    ),
    (codecs.commit_from_proto, good_commit(finish=9), "commit.finish", 9, "one of [0, 1, 2, 3]"),
    (codecs.commit_from_proto, good_commit(token=[1, 2], logprob=[-1.0]), "commit.logprob", 1, "0 or 2"),
    (
        codecs.commit_from_proto,
        good_commit(token=[1], logprob=[math.nan]),
        "a log-probability in the commit",
        "nan",
        "a number of at most 0",
    ),
    (
        codecs.commit_from_proto,
        good_commit(token=[1], logprob=[0.5]),
        "a log-probability in the commit",
        0.5,
        "a number of at most 0",
    ),
    (
        codecs.commit_from_proto,
        good_commit(token=[1], logprob=[-math.inf]),
        "a log-probability in the commit",
        "-inf",
        "a number of at most 0",
    ),
    (
        codecs.commit_from_proto,
        good_commit(top_id=[1], top_logprob=[-1.0]),
        "lengths of commit.top_id and commit.top_logprob",
        "1 and 1",
        "equal",
    ),
    (
        codecs.commit_from_proto,
        good_commit(token=[1, 1], logprob=[-1.0, -1.0], top_id=[1] * 3, top_logprob=[-1.0] * 3),
        "lengths of commit.top_id and commit.top_logprob",
        "3 and 3",
        "equal, and as many for each of 2 tokens",
    ),
    (
        codecs.commit_from_proto,
        good_commit(token=[1], logprob=[-1.0], top_id=[1] * 21, top_logprob=[-1.0] * 21),
        "alternatives in commit.top_id",
        21,
        "between 0 and 20",
    ),
    (attach_from, good_attach(logprobs=21), "attach.logprobs", 21, "between 0 and 20"),
    (attach_from, good_attach(prompt_logprobs=21), "attach.prompt_logprobs", 21, "between 0 and 20"),
    (attach_from, good_attach(scored=1), "attach.scored", 1, "between 0 and 0"),
    (attach_from, good_attach(prompt=[1] * 3, prompt_logprobs=0, scored=3), "attach.scored", 3, "between 0 and 2"),
    (
        attach_from,
        good_attach(prompt=[1] * 3, prompt_logprobs=0, scored=1, tokens=[4]),
        "attach.scored",
        1,
        "between 2 and 2",
    ),
    (
        attach_from,
        good_attach(prompt=[1] * 131_072, prompt_logprobs=4),
        "length of attach.prompt x (1 + attach.prompt_logprobs)",
        655_355,
        f"between 0 and {MAX_PROMPT_LOGPROBS}",
    ),
    (
        codecs.commit_from_proto,
        good_commit(prompt=pb.PromptLogprobs(logprob=[-1.0] * 257)),
        "length of commit.prompt.logprob",
        257,
        "between 0 and 256",
    ),
    (
        codecs.commit_from_proto,
        good_commit(prompt=pb.PromptLogprobs(start=131_073)),
        "commit.prompt.start",
        131_073,
        "between 0 and 131072",
    ),
    (
        codecs.commit_from_proto,
        good_commit(prompt=pb.PromptLogprobs(logprob=[-1.0], top_id=[1])),
        "lengths of commit.prompt.top_id and commit.prompt.top_logprob",
        "1 and 0",
        "equal",
    ),
    (codecs.limits_from_proto, good_limits(nodes=65_537), "limits.nodes", 65_537, "between 0 and 65536"),
    (codecs.limits_from_proto, good_limits(depth=65_537), "limits.depth", 65_537, "between 0 and 65536"),
    (codecs.limits_from_proto, good_limits(in_flight=65_537), "limits.in_flight", 65_537, "between 0 and 65536"),
    (codecs.limits_from_proto, good_limits(run_ahead=0), "limits.run_ahead", 0, "between 1 and 65536"),
    (
        codecs.directive_from_proto,
        pb.Directive(min_acceptance=1.5),
        "directive.min_acceptance",
        1.5,
        "between 0.0 and 1.0",
    ),
    (
        codecs.directive_from_proto,
        pb.Directive(min_acceptance=math.nan),
        "directive.min_acceptance",
        "nan",
        "between 0.0 and 1.0",
    ),
    (
        codecs.directive_from_proto,
        pb.Directive(draft_wait_ms=60_001),
        "directive.draft_wait_ms",
        60_001,
        "between 0 and 60000",
    ),
    (codecs.directive_from_proto, pb.Directive(step_ms=-1.0), "directive.step_ms", -1.0, "between 0.0 and"),
    (codecs.directive_from_proto, pb.Directive(step_ms=math.inf), "directive.step_ms", "inf", "between 0.0 and"),
    (
        codecs.directive_from_proto,
        pb.Directive(step_ms=1e-310),
        "directive.step_ms",
        1e-310,
        "0 (not known) or at least 0.001",
    ),
    (open_from, good_open(session_id=""), "open.session_id", "''", f"1 to {MAX_SESSION_ID} printable characters"),
    (
        open_from,
        good_open(session_id="s" * 129),
        "open.session_id",
        "129 characters long",
        f"1 to {MAX_SESSION_ID} printable",
    ),
    (
        open_from,
        good_open(session_id="a\nb"),
        "open.session_id",
        r"'a\nb'",
        f"1 to {MAX_SESSION_ID} printable characters",
    ),
    (
        open_from,
        good_open(vocabulary_hash=b"h" * 65),
        "bytes of open.vocabulary_hash",
        65,
        f"between 0 and {MAX_HASH_BYTES}",
    ),
    (open_from, good_open(attach=good_attach(epoch=0)), "attach.epoch", 0, f"between 1 and {TOP_EPOCH}"),
    (open_from, pb.Open(session_id="s"), "attach.epoch", 0, f"between 1 and {TOP_EPOCH}"),
    (
        codecs.opened_from_proto,
        good_opened(limits=good_limits(run_ahead=0)),
        "limits.run_ahead",
        0,
        "between 1 and 65536",
    ),
    (codecs.opened_from_proto, good_opened(epoch=0), "opened.epoch", 0, f"between 1 and {TOP_EPOCH}"),
    (codecs.opened_from_proto, good_opened(epoch=2**64 - 1), "opened.epoch", 2**64 - 1, f"between 1 and {TOP_EPOCH}"),
    (
        codecs.opened_from_proto,
        good_opened(verifier_id="v" * 65),
        "opened.verifier_id",
        "65 characters long",
        f"0 to {MAX_VERIFIER_ID} printable characters",
    ),
    (
        codecs.opened_from_proto,
        good_opened(verifier_id="\x1b[2J"),
        "opened.verifier_id",
        r"'\x1b[2J'",
        "0 to 64 printable characters",
    ),
    (
        codecs.opened_from_proto,
        good_opened(vocabulary_size=MAX_VOCABULARY + 1),
        "opened.vocabulary_size",
        MAX_VOCABULARY + 1,
        f"between 0 and {MAX_VOCABULARY}",
    ),
    *(
        (
            codecs.directive_from_proto,
            pb.Directive(**{name: 65_537}),
            f"directive.{name}",
            65_537,
            "between 0 and 65536",
        )
        for name in ("window_nodes", "window_depth", "nodes_per_step")
    ),
    (codecs.commit_from_proto, good_commit(epoch=0), "commit.epoch", 0, f"between 1 and {TOP_EPOCH}"),
    (codecs.commit_from_proto, good_commit(seen=2**64 - 1), "commit.seen", 2**64 - 1, f"between 0 and {TOP_EPOCH}"),
    (codecs.commit_from_proto, good_commit(evaluated=65_537), "commit.evaluated", 65_537, "between 0 and 65536"),
    (
        codecs.commit_from_proto,
        good_commit(token=[2**32 - 1]),
        "commit.token",
        2**32 - 1,
        f"less than {MAX_VOCABULARY}",
    ),
    (commit_from, good_commit(token=[VOCABULARY]), "commit.token", VOCABULARY, f"less than {VOCABULARY}"),
    (
        codecs.commit_from_proto,
        good_commit(start=MAX_GENERATED_TOKENS, token=[1]),
        "tokens in commit.token",
        1,
        "between 0 and 0",
    ),
]


@pytest.mark.parametrize(
    ("decode", "message", "field", "got", "bound"), REFUSED, ids=[f"{case[2]}={case[3]}" for case in REFUSED]
)
def test_out_of_bounds_is_refused_by_field_value_and_bound(decode, message, field, got, bound):
    with pytest.raises(BadRequest) as caught:
        decode(over_the_wire(message))
    assert field in caught.value.field
    text = str(caught.value)
    assert f"{field} is {got}, must be {bound}" in text


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (attach_from, good_attach(max_tokens=MAX_GENERATED_TOKENS, prompt=[VOCABULARY - 1], epoch=TOP_EPOCH)),
        (attach_from, good_attach(tokens=[1] * 8, stop_token_ids=[1] * MAX_STOP_TOKENS)),
        (attach_from, good_attach(prompt=[0] * MAX_PROMPT_TOKENS)),
        (append_from, good_append(token=[999] * MAX_APPEND_NODES, up=range(MAX_APPEND_NODES))),
        (append_from, good_append(first_id=TOP_EPOCH - MAX_APPEND_NODES, base=MAX_GENERATED_TOKENS)),
        (codecs.limits_from_proto, good_limits(nodes=65_536, depth=65_536, in_flight=65_536, run_ahead=65_536)),
        (codecs.directive_from_proto, pb.Directive(min_acceptance=1.0, draft_wait_ms=60_000, step_ms=1e6)),
        (codecs.directive_from_proto, pb.Directive(window_nodes=65_536, window_depth=65_536, nodes_per_step=65_536)),
        (codecs.opened_from_proto, good_opened(epoch=TOP_EPOCH, verifier_id="v" * MAX_VERIFIER_ID)),
        (codecs.opened_from_proto, good_opened(vocabulary_size=MAX_VOCABULARY)),
        (codecs.opened_from_proto, good_opened(vocabulary_size=0, verifier_id="")),  # a verifier that does not tell
        (codecs.commit_from_proto, good_commit(epoch=TOP_EPOCH, seen=TOP_EPOCH, evaluated=65_536)),
        (codecs.commit_from_proto, good_commit(start=MAX_GENERATED_TOKENS - 1, token=[MAX_VOCABULARY - 1])),
        (open_from, good_open(session_id="s" * MAX_SESSION_ID)),
    ],
)
def test_the_bounds_themselves_are_allowed(decode, message):
    assert decode(over_the_wire(message)) is not None  # and nothing is raised


# --- bytes from anywhere

DECODERS: list[tuple[type, Callable[[Any], object]]] = [
    (pb.Open, open_from),
    (pb.Attach, attach_from),
    (pb.Append, append_from),
    (pb.Cancel, codecs.cancel_from_proto),
    (pb.Commit, codecs.commit_from_proto),
    (pb.Opened, codecs.opened_from_proto),
    (pb.Directive, codecs.directive_from_proto),
    (pb.Ping, codecs.ping_from_proto),
    (pb.SessionLimits, codecs.limits_from_proto),
]


@given(st.sampled_from(DECODERS), st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_decode_errors_and_bad_requests(pair, data):
    kind, decode = pair
    assert isinstance(raised(decode, kind, data), NoneType | DecodeError | BadRequest)


def raised(decode: Callable[[Any], object], kind: Any, data: bytes) -> Exception | None:
    try:
        decode(kind.FromString(data))
    except Exception as error:
        return error
    return None


@st.composite
def mangled(draw: st.DrawFn) -> tuple[Callable[[Any], object], type, bytes]:
    """Return a good message's bytes with some changed, which pass the parser more often than random ones."""
    kind, decode, message = draw(
        st.one_of(
            opens.map(lambda v: (pb.Open, open_from, codecs.open_to_proto(v))),
            appends().map(lambda v: (pb.Append, append_from, codecs.append_to_proto(v))),
            commits.map(lambda v: (pb.Commit, codecs.commit_from_proto, codecs.commit_to_proto(v))),
            openeds.map(lambda v: (pb.Opened, codecs.opened_from_proto, codecs.opened_to_proto(v))),
        )
    )
    data = bytearray(message.SerializeToString())
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        data[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=3))
    return decode, kind, bytes(data)


# Any value that the wire can carry, often just beyond a bound or right on it.
edges = st.sampled_from([0, 1, 65_536, 65_537, MAX_VOCABULARY, MAX_VOCABULARY + 1, 2**32 - 1])
any32 = edges | uint32
any64 = edges | uint64 | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1])
any_directive = st.builds(
    pb.Directive,
    window_nodes=any32,
    window_depth=any32,
    nodes_per_step=any32,
    min_acceptance=st.floats(),
    draft_wait_ms=any32,
    step_ms=st.floats(),
)
any_limits = st.builds(pb.SessionLimits, nodes=any32, depth=any32, in_flight=any32, run_ahead=any32)


def assert_bounded(directive: Directive) -> None:
    assert max(directive.window_nodes, directive.window_depth, directive.nodes_per_step) <= 65_536
    assert 0.0 <= directive.min_acceptance <= 1.0
    assert directive.draft_wait_ms <= 60_000
    assert 0.0 <= directive.step_ms <= 1e6


@given(any_directive)
def test_a_directive_that_comes_in_is_bounded_in_every_field(message):
    with contextlib.suppress(BadRequest):
        assert_bounded(codecs.directive_from_proto(over_the_wire(message)))


@given(
    st.builds(
        pb.Opened,
        epoch=any64,
        verifier_id=st.text(max_size=2 * MAX_VERIFIER_ID),
        limits=limits.map(codecs.limits_to_proto) | any_limits,
        directive=directives.map(codecs.directive_to_proto) | any_directive,
        vocabulary_size=any32,
    )
)
def test_an_opened_that_comes_in_is_bounded_in_every_field(message):
    with contextlib.suppress(BadRequest):
        opened = codecs.opened_from_proto(over_the_wire(message))
        assert 1 <= opened.epoch <= TOP_EPOCH
        assert len(opened.verifier_id) <= MAX_VERIFIER_ID
        assert opened.verifier_id.isprintable()
        assert max(opened.limits.nodes, opened.limits.depth, opened.limits.in_flight) <= 65_536
        assert 1 <= opened.limits.run_ahead <= 65_536
        assert_bounded(opened.directive)
        assert opened.vocabulary_size <= MAX_VOCABULARY


@given(
    st.builds(
        pb.Commit,
        epoch=any64,
        start=any32,
        token=st.lists(st.integers(0, VOCABULARY) | any32, max_size=3),
        seen=any64,
        finish=st.sampled_from(pb.Finish.values()),
        evaluated=any32,
    )
)
def test_a_commit_that_comes_in_is_bounded_in_every_field(message):
    with contextlib.suppress(BadRequest):
        commit = commit_from(over_the_wire(message))
        assert 1 <= commit.epoch <= TOP_EPOCH
        assert commit.start + len(commit.tokens) <= MAX_GENERATED_TOKENS
        assert all(token < VOCABULARY for token in commit.tokens)
        assert commit.seen <= TOP_EPOCH
        assert commit.evaluated <= 65_536


@given(mangled())
def test_mangled_messages_raise_nothing_but_decode_errors_and_bad_requests(case):
    decode, kind, data = case
    assert isinstance(raised(decode, kind, data), NoneType | DecodeError | BadRequest)


@given(mangled())
def test_what_a_decoder_lets_in_can_be_sent_again(case):
    """A value that passes its bounds is a value that we could have made."""
    decode, kind, data = case
    try:
        value = decode(kind.FromString(data))
    except (DecodeError, BadRequest):
        return
    encode = {Open: codecs.open_to_proto, Append: codecs.append_to_proto, Commit: codecs.commit_to_proto}.get(
        type(value), codecs.opened_to_proto
    )
    assert decode(over_the_wire(encode(value))) == value
