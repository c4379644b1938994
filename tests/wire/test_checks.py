"""Test that session messages out of bounds are refused where they come in, and that what they pack comes out again."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import BadRequest
from outrider.core.protocol.messages import (
    MAX_GENERATED_TOKENS,
    MAX_PROMPT_TOKENS,
    MAX_SESSION_ID,
    MAX_VOCABULARY,
    Commit,
    SessionLimits,
    TokenLogprobs,
    append_message,
    logprobs_of,
    pack_logprobs,
    parents_of,
    sampling_message,
    sampling_of,
)
from outrider.core.sampling import MAX_DELTA, SamplingParams, TypicalAcceptance
from outrider.wire import checks
from outrider.wire.checks import check_commit
from outrider.wire.v1 import session_pb2 as pb

VOCABULARY = 1000
check_attach, check_append, check_open = (
    functools.partial(check, vocabulary_size=VOCABULARY)
    for check in (checks.check_attach, checks.check_append, checks.check_open)
)

ids = st.integers(0, VOCABULARY - 1)
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
    grammar=st.text(st.characters(exclude_categories=("Cs",)), max_size=9),
    typical=st.none()
    | st.builds(TypicalAcceptance, st.floats(0.0, 1.0, exclude_min=True), st.floats(0.0, MAX_DELTA, exclude_min=True)),
)


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


# --- what is packed comes out


@given(sampling)
def test_sampling_parameters_survive(params: SamplingParams) -> None:
    assert sampling_of(over_the_wire(sampling_message(params))) == params


@given(st.integers(1, 2**62), st.data())
def test_a_trees_parents_survive(first: int, data: st.DataObject) -> None:
    parents = [data.draw(st.integers(0, first + i - 1)) for i in range(data.draw(st.integers(0, 20)))]
    message = over_the_wire(append_message(1, first, 0, parents, range(len(parents))))
    check_append(message)
    assert parents_of(message) == parents and list(message.token) == list(range(len(parents)))


@given(st.integers(0, 20), st.data())
def test_log_probabilities_survive(each: int, data: st.DataObject) -> None:
    values = st.floats(-1e4, 0.0, width=32)
    tops = st.lists(st.tuples(ids, values), min_size=each, max_size=each).map(tuple)
    known = tuple(data.draw(st.lists(st.builds(TokenLogprobs, values, tops), max_size=5)))
    message = Commit(epoch=1, token=range(len(known)))
    pack_logprobs(message, known)
    check_commit(over_the_wire(message))
    assert logprobs_of(over_the_wire(message)) == known


def test_limits_survive() -> None:
    limits = SessionLimits(1, 2, 3, 4, 5)
    assert checks.limits_of(over_the_wire(limits.message)) == limits


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
    (check_attach, good_attach(epoch=0), f"attach.epoch is 0, must be between 1 and {TOP_EPOCH}"),
    (check_attach, good_attach(prompt=[]), f"length of attach.prompt is 0, must be between 1 and {MAX_PROMPT_TOKENS}"),
    (check_attach, good_attach(prompt=[1, VOCABULARY]), "attach.prompt is 1000, must be less than 1000"),
    (check_attach, good_attach(max_tokens=0), "attach.max_tokens is 0, must be between 1"),
    (check_attach, good_attach(tokens=[1] * 9), "length of attach.tokens is 9, must be between 0 and 8"),
    (check_attach, good_attach(stop_token_ids=[1] * 65), "length of attach.stop_token_ids is 65, must be"),
    (check_attach, good_attach(logprobs=21), "attach.logprobs is 21, must be between 0 and 20"),
    (check_attach, good_attach(scored=1), "attach.scored is 1, must be between 0 and 0"),
    (
        check_attach,
        good_attach(prompt=[1] * 3, prompt_logprobs=0, scored=1, tokens=[4]),
        "scored is 1, must be between",
    ),
    (check_attach, good_attach(prompt=[1] * 131_072, prompt_logprobs=4), "655355, must be between 0 and"),
    (check_attach, sampled(temperature=math.nan), "temperature is nan, must be between 0"),
    (check_attach, sampled(top_p=0.0), "top_p is 0.0, must be greater than 0"),
    (check_append, good_append(first_id=0), "append.first_id is 0, must be between 1"),
    (check_append, good_append(base=MAX_GENERATED_TOKENS + 1), "append.base is"),
    (check_append, good_append(token=[1] * 1025, up=[0] * 1025), "nodes in append.token is 1025, must be between 0"),
    (
        check_append,
        good_append(token=[1, 2], up=[0]),
        "length of append.up is 1, must be 2, the length of append.token",
    ),
    (check_append, good_append(token=[1], up=[1]), "append.up[0] is 1, must be less than 1"),
    (check_append, good_append(token=[1000], up=[0]), "append.token is 1000, must be less than 1000"),
    (checks.check_ping, pb.Ping(rtt_ms=math.nan), "ping.rtt_ms is nan, must be between 0"),
    (check_commit, good_commit(epoch=0), "commit.epoch is 0, must be between 1"),
    (
        check_commit,
        good_commit(start=MAX_GENERATED_TOKENS, token=[1]),
        "tokens in commit.token is 1, must be between 0",
    ),
    (check_commit, good_commit(seen=2**64 - 1), "commit.seen is 18446744073709551615, must be between 0"),
    (check_commit, good_commit(finish=9), "commit.finish is 9, must be one of [0, 1, 2, 3]"),
    (check_commit, good_commit(token=[MAX_VOCABULARY]), "commit.token is 16777216, must be less than 16777216"),
    (check_commit, good_commit(token=[1, 2], logprob=[-1.0]), "commit.logprob is 1, must be 0 or 2"),
    (
        check_commit,
        good_commit(token=[1], logprob=[0.5]),
        "a log-probability in the commit is 0.5, must be a number of",
    ),
    (check_commit, good_commit(top_id=[1], top_logprob=[-1.0]), "top_id and commit.top_logprob is 1 and 1, must be"),
    (
        check_commit,
        good_commit(token=[1], logprob=[-1.0], top_id=[1] * 21, top_logprob=[-1.0] * 21),
        "commit.top_id is",
    ),
    (
        check_commit,
        good_commit(prompt=pb.PromptLogprobs(logprob=[-1.0] * 257)),
        "commit.prompt.logprob is 257, must be",
    ),
    (checks.limits_of, good_limits(run_ahead=0), "limits.run_ahead is 0, must be between 1 and 65536"),
    (checks.check_directive, pb.Directive(min_acceptance=math.nan), "directive.min_acceptance is nan, must be between"),
    (checks.check_directive, pb.Directive(step_ms=1e-310), "directive.step_ms is 1e-310, must be 0 (not known) or at"),
    (
        check_open,
        good_open(session_id=""),
        f"open.session_id is '', must be 1 to {MAX_SESSION_ID} printable characters",
    ),
    (check_open, good_open(session_id="a\nb"), r"open.session_id is 'a\nb', must be 1"),
    (check_open, good_open(vocabulary_hash=b"h" * 65), "bytes of open.vocabulary_hash is 65, must be between 0"),
    (check_open, pb.Open(session_id="s"), "attach.epoch is 0, must be between 1"),
    (checks.check_opened, good_opened(verifier_id="\x1b[2J"), r"opened.verifier_id is '\x1b[2J', must be 0 to"),
    (checks.check_opened, good_opened(vocabulary_size=MAX_VOCABULARY + 1), "opened.vocabulary_size is"),
]


@pytest.mark.parametrize(("check", "message", "said"), REFUSED, ids=[case[2] for case in REFUSED])
def test_out_of_bounds_is_refused_by_field_value_and_bound(check, message, said):
    with pytest.raises(BadRequest) as caught:
        check(over_the_wire(message))
    assert said in str(caught.value)
    assert caught.value.field in str(caught.value)


# --- bytes from anywhere

GOOD: list[tuple[Callable[[Any], object], Any]] = [
    (
        check_open,
        pb.Open(session_id="s", attach=sampled(temperature=0.5, bias_id=[1], bias=[2.0]), vocabulary_hash=b"h"),
    ),
    (check_append, good_append(up=[0, 1], token=[5, 6], base=3)),
    (check_commit, good_commit(start=2, token=[5, 6], logprob=[-1.0, -2.0], top_id=[1, 2], top_logprob=[-1.0, -2.0])),
    (checks.check_opened, good_opened(verifier_id="v", directive=pb.Directive(step_ms=7.0))),
]


@given(st.sampled_from(GOOD), st.data())
def test_a_mangled_message_is_taken_or_refused_as_a_bad_request(case: Any, data: st.DataObject) -> None:
    check, message = case
    mangled = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, max(0, len(mangled) - 1)))
        mangled[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    with contextlib.suppress(DecodeError, BadRequest):  # and nothing else
        check(type(message).FromString(bytes(mangled)))
