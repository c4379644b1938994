"""Test that `outrider top` derives rates from the counters of two frames."""

from coordinator.cli.top import HISTORY, Rates


def look(evaluated=0, accepted=0, committed=0, epoch=1, tokens_per_s=0.0, name="v1"):
    share = accepted / evaluated if evaluated else None
    return {
        "verifiers": [
            {
                "id": name,
                "evaluated": evaluated,
                "accepted": accepted,
                "acceptance": share,
                "tokens_per_s": tokens_per_s,
            }
        ],
        "sessions": [{"id": "s", "epoch": epoch, "committed": committed}],
    }


def test_after_one_look_acceptance_is_of_the_whole_life_and_there_is_no_rate():
    rates = Rates()
    rates.add(seen := look(100, 40, 500), 10.0)
    assert rates.acceptance(seen["verifiers"][0]) == 0.4
    assert rates.tokens_per_s("s") is None


def test_after_two_looks_both_are_of_the_time_between():
    rates = Rates()
    rates.add(look(100, 40, 500), 10.0)
    rates.add(seen := look(200, 130, 560), 12.0)
    assert rates.acceptance(seen["verifiers"][0]) == 0.9
    assert rates.tokens_per_s("s") == 30.0


def test_where_no_node_was_evaluated_since_the_last_word_stands():
    rates = Rates()
    for at, (evaluated, accepted) in enumerate(((100, 40), (200, 130), (200, 130)), start=1):
        rates.add(seen := look(evaluated, accepted), float(at))
    assert rates.acceptance(seen["verifiers"][0]) == 0.9


def test_counts_that_went_down_with_a_session_that_ended_say_nothing():
    rates = Rates()
    rates.add(look(1000, 400, 500), 1.0)
    rates.add(seen := look(100, 90, 500), 2.0)
    assert rates.acceptance(seen["verifiers"][0]) == 0.9  # of the sessions that are left
    rates.add(look(50, 40, 100, epoch=2), 3.0)
    assert rates.tokens_per_s("s") is None  # it began again elsewhere


def test_who_is_gone_is_forgotten_and_history_is_bounded():
    rates = Rates()
    for at in range(2 * HISTORY):
        rates.add(look(tokens_per_s=float(at)), float(at + 1))
    assert list(rates.history["v1"]) == [float(at) for at in range(HISTORY, 2 * HISTORY)]
    rates.add(look(name="v2"), 1_000.0)
    assert set(rates.history) == {"v2"}
