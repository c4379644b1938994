"""Test the device's rules one by one, and the verifier's where a session begins and ends."""

from __future__ import annotations

import pytest
from session_messages import append, attach, changed, scored
from session_messages import commit as commit_of

from outrider.core.errors import Fenced, ProtocolViolation
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Commit, Finish, SessionLimits, TokenLogprobs
from outrider.core.protocol.verifier import VerifierSession

EOS = 9
LIMITS = SessionLimits(nodes=4, depth=3, in_flight=5, run_ahead=4)


def device(limits: SessionLimits = LIMITS, max_tokens: int = 50) -> DeviceSession:
    session = DeviceSession(attach(0, (1, 2), max_tokens=max_tokens), (EOS,))
    session.attach(1, limits)
    return session


def commit(session: DeviceSession, *tokens: int, seen: int = 0, finish: Finish = Finish.NONE) -> Commit:
    return commit_of(session.epoch, len(session.received), tokens, seen, finish)


def test_attach_takes_only_a_greater_epoch() -> None:
    session = device()
    for epoch in (0, 1):
        with pytest.raises(Fenced, match=f"epoch is {epoch}, must be greater than 1"):
            session.attach(epoch, LIMITS)


@pytest.mark.parametrize(("run_ahead", "after"), [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_a_silent_device_reports_what_it_received_at_half_of_the_run_ahead(run_ahead: int, after: int) -> None:
    session = device(SessionLimits(4, 3, 5, run_ahead))
    for received in range(1, after):
        session.on_commit(commit(session, 3))
        assert session.poll(resting=False) is None, received
    session.on_commit(commit(session, 3))
    assert session.poll(resting=False) == append(1, 1, after)
    assert session.poll(resting=False) is None


def test_a_delivered_token_never_changes() -> None:
    session = device()
    session.on_commit(commit(session, 3, 4))
    with pytest.raises(ProtocolViolation):
        session.on_commit(commit_of(1, 1, (5, 6), 0))
    assert session.received == [3, 4]


def verifier(tokens: tuple[int, ...], kept: tuple[int, ...], max_tokens: int = 50) -> VerifierSession:
    opened = attach(4, (1,), tokens=tokens, max_tokens=max_tokens)
    return VerifierSession(opened, LIMITS, eos_token_ids=(EOS,), kept=kept)


def test_an_end_that_the_device_missed_is_sent_again() -> None:
    session = verifier((3,), (3, EOS))
    assert session.resend() == commit_of(4, 1, (EOS,), 0, Finish.EOS)
    assert not session.may_step
    full = verifier((3, 4), (3, 4), max_tokens=2)
    assert full.resend() == commit_of(4, 2, (), 0, Finish.LENGTH)


def test_no_more_tokens_are_accepted_than_were_asked_for() -> None:
    session = device(max_tokens=3)
    session.on_commit(commit(session, 3, 4))
    with pytest.raises(ProtocolViolation, match="ends at 4, must be at most 3"):
        session.on_commit(commit(session, 5, 6))
    assert session.received == [3, 4]
    delivery = session.on_commit(commit(session, 5, finish=Finish.LENGTH))
    assert delivery is not None and delivery.tokens == (5,)


# --- log-probabilities of the prompt


def scores(*values: float) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(value) for value in values)


def scoring(max_tokens: int = 4) -> DeviceSession:
    session = DeviceSession(attach(0, (5, 6, 7), max_tokens=max_tokens, prompt_logprobs=0))
    assert session.attach(1, LIMITS).prompt_logprobs == 0
    return session


def test_a_verifier_that_scores_no_prompt_or_too_much_of_it_is_refused() -> None:
    session = scoring()
    with pytest.raises(ProtocolViolation, match="must come after 2; is the verifier older"):
        session.on_commit(commit_of(1, 0, (8,), 0))
    with pytest.raises(ProtocolViolation, match="scores 3 tokens of the prompt, must be at most 2"):
        session.on_commit(scored(1, 0, 0, scores(-1.0, -1.0, -1.0)))
    unasked = device()
    with pytest.raises(ProtocolViolation, match="must be at most 0"):
        unasked.on_commit(scored(1, 0, 0, scores(-1.0)))
    assert not session.scored and not session.received


def test_a_kept_sequence_waits_for_the_prompts_log_probabilities() -> None:
    opened = attach(2, (5, 6, 7), max_tokens=9, prompt_logprobs=0, scored=1)
    verifier = VerifierSession(opened, LIMITS, kept=(8, 9))
    assert verifier.resend() is None and not verifier.committed
    complete = VerifierSession(changed(opened, scored=2), LIMITS, kept=(8, 9))
    expected = commit_of(2, 0, (8, 9), 0)
    expected.prompt.start = 2
    assert complete.resend() == expected


def test_many_log_probabilities_come_in_several_commits() -> None:
    verifier = VerifierSession(attach(1, (1,) * 601, max_tokens=0, prompt_logprobs=0), LIMITS)
    commits = verifier.score(scores(-1.0) * 600)
    assert [(one.prompt.start, len(one.prompt.logprob)) for one in commits] == [(0, 256), (256, 256), (512, 88)]
    assert [one.finish for one in commits] == [Finish.NONE, Finish.NONE, Finish.LENGTH]
