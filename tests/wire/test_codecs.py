"""Test that codecs return what they were given, and refuse values out of bounds by field, value and bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import BadRequest
from outrider.core.protocol.messages import (
    MAX_GENERATED_TOKENS,
    MAX_LOGPROBS,
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


directive_from, limits_from = codecs.directive_from_proto, codecs.limits_from_proto
opened_from = codecs.opened_from_proto


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


# --- what goes out comes in


@given(
    st.one_of(
        sampling.map(lambda v: (v, codecs.sampling_from_proto(over_the_wire(codecs.sampling_to_proto(v))))),
        appends().map(lambda v: (v, append_from(over_the_wire(codecs.append_to_proto(v)), v.epoch))),
        (commits | commits_with_logprobs()).map(
            lambda v: (v, codecs.commit_from_proto(over_the_wire(codecs.commit_to_proto(v))))
        ),
        st.builds(Cancel, epochs).map(
            lambda v: (v, codecs.cancel_from_proto(over_the_wire(codecs.cancel_to_proto(v))))
        ),
        opens.map(lambda v: (v, open_from(over_the_wire(codecs.open_to_proto(v))))),
        openeds.map(lambda v: (v, codecs.opened_from_proto(over_the_wire(codecs.opened_to_proto(v))))),
    )
)
def test_a_message_survives(sent_and_received):
    sent, received = sent_and_received
    assert received == sent


def test_every_field_of_our_messages_is_on_the_wire_and_the_other_way_round():
    """A field added on one side alone would be lost in silence."""
    for ours, theirs in [
        (Attach, pb.Attach),
        (Commit, pb.Commit),
        (SessionLimits, pb.SessionLimits),
        (Directive, pb.Directive),
        (SamplingParams, pb.Sampling),
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
REFUSED: list[tuple[Callable[[Any], object], Any, str]] = [
    (attach_from, good_attach(epoch=0), f"attach.epoch is 0, must be between 1 and {TOP_EPOCH}"),
    (attach_from, good_attach(prompt=[]), f"length of attach.prompt is 0, must be between 1 and {MAX_PROMPT_TOKENS}"),
    (attach_from, good_attach(prompt=[1, VOCABULARY]), "attach.prompt is 1000, must be less than 1000"),
    (attach_from, good_attach(max_tokens=0), "attach.max_tokens is 0, must be between 1"),
    (attach_from, good_attach(tokens=[1] * 9), "length of attach.tokens is 9, must be between 0 and 8"),
    (attach_from, good_attach(stop_token_ids=[1] * 65), "length of attach.stop_token_ids is 65, must be"),
    (attach_from, good_attach(logprobs=21), "attach.logprobs is 21, must be between 0 and 20"),
    (attach_from, good_attach(scored=1), "attach.scored is 1, must be between 0 and 0"),
    (attach_from, good_attach(prompt=[1] * 3, prompt_logprobs=0, scored=1, tokens=[4]), "scored is 1, must be between"),
    (attach_from, good_attach(prompt=[1] * 131_072, prompt_logprobs=4), "655355, must be between 0 and"),
    (attach_from, sampled(temperature=math.nan), "temperature is nan, must be between 0"),
    (attach_from, sampled(top_p=0.0), "top_p is 0.0, must be greater than 0"),
    (append_from, good_append(first_id=0), "append.first_id is 0, must be between 1"),
    (append_from, good_append(base=MAX_GENERATED_TOKENS + 1), "append.base is"),
    (append_from, good_append(token=[1] * 1025, up=[0] * 1025), "nodes in append.token is 1025, must be between 0"),
    (append_from, good_append(token=[1, 2], up=[0]), "length of append.up is 1, must be 2, the length of append.token"),
    (append_from, good_append(token=[1], up=[1]), "append.up[0] is 1, must be less than 1"),
    (append_from, good_append(token=[1000], up=[0]), "append.token is 1000, must be less than 1000"),
    (codecs.check_ping, pb.Ping(rtt_ms=math.nan), "ping.rtt_ms is nan, must be between 0"),
    (codecs.cancel_from_proto, pb.Cancel(), "cancel.epoch is 0, must be between 1"),
    (commit_from, good_commit(epoch=0), "commit.epoch is 0, must be between 1"),
    (commit_from, good_commit(start=MAX_GENERATED_TOKENS, token=[1]), "tokens in commit.token is 1, must be between 0"),
    (commit_from, good_commit(seen=2**64 - 1), "commit.seen is 18446744073709551615, must be between 0"),
    (commit_from, good_commit(finish=9), "commit.finish is 9, must be one of [0, 1, 2, 3]"),
    (commit_from, good_commit(token=[VOCABULARY]), "commit.token is 1000, must be less than 1000"),
    (commit_from, good_commit(token=[1, 2], logprob=[-1.0]), "commit.logprob is 1, must be 0 or 2"),
    (commit_from, good_commit(token=[1], logprob=[0.5]), "a log-probability in the commit is 0.5, must be a number of"),
    (commit_from, good_commit(top_id=[1], top_logprob=[-1.0]), "top_id and commit.top_logprob is 1 and 1, must be"),
    (commit_from, good_commit(token=[1], logprob=[-1.0], top_id=[1] * 21, top_logprob=[-1.0] * 21), "commit.top_id is"),
    (commit_from, good_commit(prompt=pb.PromptLogprobs(logprob=[-1.0] * 257)), "commit.prompt.logprob is 257, must be"),
    (limits_from, good_limits(run_ahead=0), "limits.run_ahead is 0, must be between 1 and 65536"),
    (directive_from, pb.Directive(min_acceptance=math.nan), "directive.min_acceptance is nan, must be between"),
    (directive_from, pb.Directive(step_ms=1e-310), "directive.step_ms is 1e-310, must be 0 (not known) or at"),
    (open_from, good_open(session_id=""), f"open.session_id is '', must be 1 to {MAX_SESSION_ID} printable characters"),
    (open_from, good_open(session_id="a\nb"), r"open.session_id is 'a\nb', must be 1"),
    (open_from, good_open(vocabulary_hash=b"h" * 65), "bytes of open.vocabulary_hash is 65, must be between 0"),
    (open_from, pb.Open(session_id="s"), "attach.epoch is 0, must be between 1"),
    (opened_from, good_opened(verifier_id="\x1b[2J"), r"opened.verifier_id is '\x1b[2J', must be 0 to"),
    (opened_from, good_opened(vocabulary_size=MAX_VOCABULARY + 1), "opened.vocabulary_size is"),
]


@pytest.mark.parametrize(("decode", "message", "said"), REFUSED, ids=[case[2] for case in REFUSED])
def test_out_of_bounds_is_refused_by_field_value_and_bound(decode, message, said):
    with pytest.raises(BadRequest) as caught:
        decode(over_the_wire(message))
    assert said in str(caught.value)
    assert caught.value.field in str(caught.value)


# --- bytes from anywhere


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


@given(mangled())
def test_what_a_decoder_lets_in_can_be_sent_again(case):
    """A value that passes its bounds is a value that we could have made."""
    decode, kind, data = case
    try:
        value = decode(kind.FromString(data))
    except (DecodeError, BadRequest):  # and nothing else
        return
    encode = {Open: codecs.open_to_proto, Append: codecs.append_to_proto, Commit: codecs.commit_to_proto}.get(
        type(value), codecs.opened_to_proto
    )
    assert decode(over_the_wire(encode(value))) == value
