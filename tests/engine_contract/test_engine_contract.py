"""Test what every engine promises, whatever runs its target: lossless output, fencing, bounds, and no leaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_builds import CONFIG
from served_devices import DIRECTIVE, LIMITS, SAMPLINGS, Served, device_of, preemptions, prompt_of
from session_messages import attach

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.sampling import Sampler
from outrider.core.errors import BadRequest, Fenced, InternalError, Overloaded
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import logprobs_of
from outrider.core.sampling import SamplingParams


def alone(serve: Callable[..., Served], prompt: Sequence[int], sampling: str, **options: object) -> list[int]:
    """Return the tokens of a session that is alone and drafts nothing."""
    served = serve()
    served.attach("alone", device_of(prompt, sampling, ignore_eos=True, **options))
    served.run()
    served.engine.stop("alone")
    return served.devices["alone"].received


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_change_no_token(serve: Callable[..., Served], sampling: str) -> None:
    prompts = [prompt_of(length) for length in (1, 5, 33, 150)]
    expected = [alone(serve, prompt, sampling) for prompt in prompts]
    served = serve()
    for number, (prompt, truth) in enumerate(zip(prompts, expected, strict=True)):
        served.attach(f"s{number}", device_of(prompt, sampling, ignore_eos=True), truth)
    served.run()
    assert [device.received for device in served.devices.values()] == expected
    assert served.engine.counters.accepted > 0
    for name in served.devices:
        served.engine.stop(name)
    assert served.engine.stats().verifier.kv_used == 0


def test_sessions_that_join_and_leave_change_no_token_of_others(serve: Callable[..., Served]) -> None:
    prompts = [prompt_of(20 + 11 * number, number) for number in range(8)]
    expected = [alone(serve, prompt, "sampled") for prompt in prompts]
    served = serve()
    for number, (prompt, truth) in enumerate(zip(prompts, expected, strict=True)):
        served.attach(f"s{number}", device_of(prompt, "sampled", ignore_eos=True), truth if number % 2 else ())
        served.turn()
        if number in (3, 5):
            served.engine.stop(f"s{number - 1}")
            del served.devices[f"s{number - 1}"]
    served.run()
    for name, device in served.devices.items():
        assert device.received == expected[int(name[1:])]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_session_goes_on_with_the_same_tokens_in_its_next_epoch(serve: Callable[..., Served], sampling: str) -> None:
    prompt = prompt_of(40)
    expected = alone(serve, prompt, sampling)
    served = serve()
    device = device_of(prompt, sampling, ignore_eos=True)
    served.attach("s", device, expected)
    while len(device.received) < 8:
        served.turn()
    served.engine.stop("s")
    elsewhere = serve()  # it knows nothing of the session but what the device sends
    elsewhere.attach("s", device, expected)
    elsewhere.run()
    assert device.received == expected


def test_a_later_epoch_takes_over_and_an_earlier_one_is_fenced(serve: Callable[..., Served]) -> None:
    prompt = prompt_of(10)
    expected = alone(serve, prompt, "greedy")
    served = serve()
    device = device_of(prompt, ignore_eos=True)
    served.attach("s", device, expected)
    served.turn()
    served.attach("s", device, expected)
    late = attach(1, prompt, max_tokens=24)
    with pytest.raises(Fenced):
        served.engine.start("s", late, LIMITS, DIRECTIVE)
    served.run()
    assert device.received == expected


def test_log_probabilities_are_those_of_the_target(serve: Callable[..., Served]) -> None:
    expected = alone(serve, prompt_of(25), "greedy")
    found = []
    for truth in ((), expected):
        served = serve()
        served.attach("s", device_of(prompt_of(25), ignore_eos=True, logprobs=3), truth)
        served.run()
        found.append([one for commit in served.commits["s"] for one in logprobs_of(commit)])
    plain, drafted = found
    assert len(plain) == len(drafted) == len(expected)
    for token, one, other in zip(expected, plain, drafted, strict=True):
        assert [token] == [one.top[0][0]] and one.top[0][1] == pytest.approx(one.logprob, abs=1e-4)
        assert len(one.top) == 3 and one.logprob <= 0.0
        assert other.logprob == pytest.approx(one.logprob, abs=1e-3)


def test_recorded_tokens_are_those_that_were_committed_with_their_distributions(serve: Callable[..., Served]) -> None:
    expected = alone(serve, prompt_of(25), "greedy")
    served = serve()
    served.attach("s", device_of(prompt_of(25), ignore_eos=True), expected, record=True)
    served.attach("unrecorded", device_of(prompt_of(26), ignore_eos=True))
    served.run()
    assert {one.session_id for one in served.recorded} == {"s"}
    recorded = [one.recorded for one in served.recorded]
    assert [token for one in recorded for token in one.token] == expected
    assert [one.start for one in recorded] == [commit.start for commit in served.commits["s"]]
    for one in recorded:
        assert one.top == CONFIG.record_top
        ids = np.frombuffer(one.top_ids, "<u4").reshape(-1, one.top)
        log_probs = np.frombuffer(one.top_log_probs, "<f2").reshape(-1, one.top).astype(np.float32)
        assert ids[:, 0].tolist() == list(one.token)  # greedy
        assert (np.diff(log_probs) <= 0.0).all()
        assert np.frombuffer(one.tail, "<f2") == pytest.approx(1.0 - np.exp(log_probs).sum(axis=1), abs=5e-3)
        assert len(one.proposed_depths) == len(one.token)


def test_a_prompt_is_computed_once_for_a_tenant_and_again_for_another(serve: Callable[..., Served]) -> None:
    served = serve()
    counters = served.engine.counters
    for name, salt, cached in (("first", "a", False), ("second", "a", True), ("stranger", "b", False)):
        before = counters.prefix_tokens
        served.attach(name, device_of(prompt_of(200), ignore_eos=True, max_tokens=4), salt=salt)
        assert (counters.prefix_tokens - before >= 100) is cached
        served.run()
    received = [device.received for device in served.devices.values()]
    assert received[0] == received[1] == received[2]


def test_sessions_whose_tokens_do_not_all_fit_still_end_with_their_own(serve: Callable[..., Served]) -> None:
    """An engine either admits what surely fits, or makes room and computes again what it had to drop."""
    small = EngineConfig(kv_slots=512, token_budget=128, max_sessions=16)
    prompts = [prompt_of(100, number) for number in range(4)]
    expected = [alone(lambda: serve(small), prompt, "sampled", max_tokens=120) for prompt in prompts]
    served = serve(small)
    before = preemptions(served)
    waiting = list(range(4))
    while waiting or not all(device.finished for device in served.devices.values()):
        if waiting:
            number = waiting[0]
            try:
                device = device_of(prompts[number], "sampled", ignore_eos=True, max_tokens=120)
                served.attach(f"s{number}", device, expected[number])
                waiting.pop(0)
            except Overloaded:
                assert served.devices, "an empty engine refuses a session"
        served.turn()
    assert not served.failures
    assert [served.devices[f"s{number}"].received for number in range(4)] == expected
    assert before is None or (preemptions(served) or 0) > before


def test_a_session_whose_device_sleeps_while_others_take_its_room_goes_on_when_it_wakes(
    serve: Callable[..., Served],
) -> None:
    small = EngineConfig(kv_slots=512, token_budget=128, max_sessions=16)
    prompts = [prompt_of(100, number) for number in range(3)]
    expected = [alone(lambda: serve(small), prompt, "sampled", max_tokens=112) for prompt in prompts]
    served = serve(small)
    before = preemptions(served)
    served.attach("s0", device_of(prompts[0], "sampled", ignore_eos=True, max_tokens=112), expected[0])
    served.asleep.add("s0")
    for _ in range(LIMITS.run_ahead + 8):
        served.turn()
    assert len(served.devices["s0"].received) == LIMITS.run_ahead
    waiting = ["s1", "s2"]
    while waiting or not all(served.devices[name].finished for name in ("s1", "s2")):
        if waiting:
            number = int(waiting[0][1:])
            try:
                device = device_of(prompts[number], "sampled", ignore_eos=True, max_tokens=112)
                served.attach(waiting[0], device, expected[number])
                waiting.pop(0)
            except Overloaded:
                assert len(served.devices) > 1, "a sleeping session keeps all others out"
        served.turn()
    assert len(served.devices["s0"].received) == LIMITS.run_ahead
    assert before is None or (preemptions(served) or 0) > before
    served.asleep.clear()
    served.run()
    assert not served.failures
    assert [served.devices[f"s{number}"].received for number in range(3)] == expected


def test_the_longest_sequence_is_served_to_its_last_token_and_a_longer_one_refused(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    longest = served.engine._executor.capabilities.max_sequence
    prompt = prompt_of(longest - 12)
    with pytest.raises(BadRequest, match=f"at most {longest}"):
        served.attach("longer", device_of(prompt, ignore_eos=True, max_tokens=13))
    expected = alone(serve, prompt, "greedy", max_tokens=12)
    served.attach("s", device_of(prompt, ignore_eos=True, max_tokens=12), expected)
    served.run()
    assert served.devices["s"].received == expected and len(expected) == 12


def spoil(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Let a session with seed 13 have logits that are not finite, or its sampling raise an error."""
    choose = Sampler.choose

    def spoilt(sampler: Sampler, row: Any, position: int, path: Sequence[int], *children: Any) -> int:
        if sampler.params.seed == 13 and fault == "an error":
            raise IndexError("spoilt")
        return choose(sampler, row * float("nan") if sampler.params.seed == 13 else row, position, path, *children)

    confirms = Sampler.confirms
    monkeypatch.setattr(Sampler, "choose", spoilt)
    monkeypatch.setattr(Sampler, "confirms", lambda one, *asked: one.params.seed != 13 and confirms(one, *asked))


@pytest.mark.parametrize(("fault", "drafting"), [("no number", False), ("no number", True), ("an error", True)])
def test_a_session_for_which_no_token_can_be_chosen_fails_alone(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, fault: str, drafting: bool
) -> None:
    expected = alone(serve, prompt_of(30), "sampled")
    spoil(monkeypatch, fault)
    served = serve()
    served.attach("neighbour", device_of(prompt_of(30), "sampled", ignore_eos=True), expected if drafting else ())
    served.turn()
    params = SamplingParams(temperature=0.5, seed=13)
    served.attach("victim", DeviceSession(attach(0, prompt_of(20), sampling=params, max_tokens=24, ignore_eos=True)))
    served.run()
    assert isinstance(served.failures["victim"].error, InternalError)
    assert served.devices["neighbour"].received == expected
    assert served.engine.stats().verifier.kv_used == 0


def test_nobody_begins_with_keys_and_values_of_a_session_that_failed(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "no number")
    served = serve()
    params = SamplingParams(temperature=0.5, seed=13)
    served.attach(
        "victim", DeviceSession(attach(0, prompt_of(100, seed=3), sampling=params, max_tokens=24)), salt="failed"
    )
    served.run()
    assert isinstance(served.failures["victim"].error, InternalError)
    served.attach("next", device_of(prompt_of(100, seed=3), ignore_eos=True), salt="failed")
    served.run()
    assert len(served.devices["next"].received) == 24
    assert served.engine.counters.prefix_tokens == 0


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = f"start: %json {json.dumps(PERSON)}"


def constrained(served: Served, prompt: Sequence[int], sampling: str, **options: Any) -> DeviceSession:
    """Return the device of a session whose output is a person."""
    params = replace(SAMPLINGS[sampling], grammar=GRAMMAR, seed=len(prompt))
    eos = served.engine._executor.eos_token_ids
    return DeviceSession(attach(0, prompt, sampling=params, **{"max_tokens": 150, **options}), eos)


def text_of(served: Served, tokens: Sequence[int]) -> str:
    """Return the text of a constrained output that has ended by itself, without its end."""
    assert served.engine.grammars is not None
    tokenizer = served.engine.grammars.tokenizer
    assert tokens[-1] in tokenizer.eos_tokens
    return tokenizer.decode_str(list(tokens[:-1]))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_grammar_binds_every_token_and_drafts_change_none(serve: Callable[..., Served], sampling: str) -> None:
    prompts = [prompt_of(length) for length in (3, 33, 150)]
    expected = []
    for prompt in prompts:
        served = serve()
        served.attach("alone", constrained(served, prompt, sampling))
        served.attach("free", device_of(prompt_of(9), sampling, ignore_eos=True))
        served.run()
        expected.append(served.devices["alone"].received)
        person = json.loads(text_of(served, expected[-1]))
        assert list(person) == ["name", "age", "tags"] and 0 <= person["age"] <= 150 and len(person["name"]) <= 6
    free = served.devices["free"].received
    served = serve()
    for number, (prompt, truth) in enumerate(zip(prompts, expected, strict=True)):
        served.attach(f"s{number}", constrained(served, prompt, sampling), truth)
    served.attach("free", device_of(prompt_of(9), sampling, ignore_eos=True), free)
    served.run()
    assert [served.devices[f"s{number}"].received for number in range(3)] == expected
    assert served.devices["free"].received == free
    assert served.engine.counters.accepted > 0


def test_no_sequence_ends_before_its_least_length(serve: Callable[..., Served]) -> None:
    served = serve()
    prompts = [prompt_of(length) for length in (5, 20)]
    free = []
    for number, prompt in enumerate(prompts):
        served.attach(f"free{number}", device_of(prompt, "sampled", ignore_eos=True))
    served.run()
    free = [served.devices[f"free{number}"].received for number in range(2)]
    stops = [tokens[3] for tokens in free]
    expected = []
    for drafts in (False, True):
        served = serve()
        for number, prompt in enumerate(prompts):
            device = device_of(prompt, "sampled", stop_token_ids=[stops[number]], min_tokens=10)
            served.attach(f"s{number}", device, expected[number] if drafts else ())
        served.run()
        found = [served.devices[f"s{number}"].received for number in range(2)]
        assert all(len(tokens) > 10 for tokens in found)
        assert not any(stop in tokens[:10] for stop, tokens in zip(stops, found, strict=True))
        assert found == (expected or found)
        expected = found
