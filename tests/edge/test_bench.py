"""Test the figures of `outrider bench` on given texts, and that what cannot be measured is refused at once."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import pytest

from edge_agent.bench.command import add_options
from edge_agent.bench.measure import Configuration, Plan, blocks
from edge_agent.bench.report import by_category, described, rows
from edge_agent.bench.users import Run, Text, User, Users
from outrider.core.errors import BadRequest


def text(prompt: int, steps_ms: list[int], *, user: int = 0, each: int = 1, tokens: str = "", **more: Any) -> Text:
    """Return a text of which `each` tokens came at each of these times, asked for at 0 ms."""
    delivered = tuple(at / 1e3 for at in steps_ms for _ in range(each))
    ids = tuple(map(ord, tokens or "x" * len(delivered)))
    counts: dict[str, Any] = {"steps": len(steps_ms), "evaluated": 0, "accepted": 0, "bytes_up": 0, "bytes_down": 0}
    return Text(user, prompt, ids, 0.0, delivered, **counts | more)


@pytest.fixture
def configuration() -> Configuration:
    """Return two users' texts: one token in 100 ms without drafts, two in 100 ms with them."""
    plain = [text(0, [200, 300, 400, 500]), text(1, [100, 200, 300, 400], user=1, bytes_up=40)]
    fast = [
        text(0, [200, 300], each=2, accepted=1, evaluated=4, bytes_down=24),
        text(1, [100, 200], each=2, user=1, accepted=2, evaluated=4, tokens="xxxy"),
    ]
    return Configuration(50.0, 2, [Run(tuple(plain), 0.1)], [Run(tuple(fast), 0.3)])


def test_a_row_without_drafts_and_one_with_them_have_the_figures_of_all_texts(configuration: Configuration) -> None:
    plain, fast = rows([configuration])
    assert (plain["rtt_ms"], plain["users"], plain["drafts"], plain["texts"]) == (50.0, 2, False, 2)
    assert (plain["first_token_ms"], plain["token_ms"], plain["acceptance_length"]) == (150.0, 100.0, 1.0)
    assert (fast["first_token_ms"], fast["token_ms"], fast["acceptance_length"]) == (150.0, 50.0, 2.0)
    # 8 tokens in the 0.9 s of both requests; both generate from 200 ms on until 400 ms, and get 4 tokens in that time.
    assert (plain["tokens_per_s_user"], plain["tokens_per_s"]) == (8.9, 20.0)
    assert (plain["bytes_up"], fast["bytes_down"]) == (5.0, 3.0)
    assert (fast["speed_up"], fast["differing"], fast["accepted"]) == (2.0, 1, 0.375)
    # Of the 8 tokens 4 came as the target's own, one a step, 3 were the devices' draft tokens: one was the verifier's.
    assert (fast["from_devices"], fast["from_verifier"], plain["from_verifier"]) == (0.375, 0.125, 0.0)
    assert plain["speed_up"] is plain["differing"] is None


def test_categories_have_their_own_lengths_and_what_no_text_tells_is_none(configuration: Configuration) -> None:
    configuration.drafted[0] = Run((text(0, [200, 300, 400]), text(1, [100], each=4, user=1)), 0.0)
    chat, code = by_category([configuration], ["chat", "code"])
    assert (chat["category"], chat["acceptance_length"], chat["speed_up"], chat["texts"]) == ("chat", 1.0, 1.0, 1)
    assert (code["category"], code["acceptance_length"], code["speed_up"]) == ("code", 4.0, None)


def test_the_tables_say_which_texts_differ_and_that_a_measurement_was_interrupted(configuration: Configuration) -> None:
    document = {
        "whole": False,
        "too_long": 3,
        "cluster": "127.0.0.1:7700",
        "target": {"name": "T", "dtype": "float32", "backend": "b", "hardware": "h"},
        "device_drafts": ["draft.gguf", "n-grams"],
        "cpus": 2,
        "prompts": {"chat": 1, "code": 1},
        "max_tokens": 4,
        "temperature": 0.0,
        "new_prompt_first_token_ms": 300.0,
        "long_prompt": {"tokens": 1024, "tokens_per_s": 165.2},
        "rows": rows([configuration]),
        "categories": by_category([configuration], ["chat", "code"]),
    }
    said = described(document)
    assert (
        "interrupted" in said
        and "3 prompts left out" in said
        and "1 of 2 texts differ" in said
        and "draft.gguf, n-grams" in said
    )
    assert [line.split()[:4] for line in said.splitlines() if line.startswith("50 ms")] == [
        ["50", "ms", "2", "no"],
        ["50", "ms", "2", "yes"],
    ]
    assert "after 300 ms, and one of 1,024 tokens was read at 165 tokens/s" in said
    assert "2.00 (2.00x)" in said and "1 of 2\n" in said and "2 CPUs" in said
    document |= {"whole": True, "too_long": 0, "cluster": "10.0.0.1:7700"}
    assert (
        "interrupted" not in described(document)
        and "left out" not in described(document)
        and "CPU" not in described(document)
    )


def test_parts_of_the_prompts_give_every_user_two_or_more_and_each_prompt_comes_once() -> None:
    for prompts, users in ((16, 1), (16, 4), (17, 4), (16, 16), (31, 16), (3, 2)):
        found = blocks(prompts, users)
        assert [i for begin, end in found for i in range(begin, end)] == list(range(prompts))
        assert all(end - begin >= min(prompts, 2 * users) for begin, end in found)


def test_users_of_a_process_share_its_prompts_and_none_has_nothing_to_do() -> None:
    users = Users({}, [("a",)] * 9, count=3)
    assert users.prompts_of([0, 2]) == [1, 3, 4, 6, 7] and users.prompts_of([1]) == [2, 5, 8]
    assert Users({}, [("a",)] * 3, count=3).prompts_of(range(3)) == [1, 1, 2]


async def test_who_is_done_takes_the_next_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[int, int]] = []

    async def texts(user: User, prompt: int, until: float | None) -> list[Text]:
        for _ in range(1 if user.number else 10):
            await asyncio.sleep(0)
        ended.append((user.number, prompt))
        return []

    monkeypatch.setattr(User, "_texts", texts)
    users, queue = Users({}, [("a",)] * 6, count=2), iter(range(1, 6))
    await asyncio.gather(*(User(users, number, None).run(queue, None) for number in range(2)))  # type: ignore[arg-type]
    assert ended == [(1, 2), (1, 3), (1, 4), (1, 5), (0, 1)]


def test_more_users_than_prompts_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"4 users need as many prompts.*got 3 prompts"):
        Plan(Users({}, [("a",)] * 4), users=[1, 4], rtts_ms=[0.0], cores=[0])


@pytest.mark.parametrize(
    "wrong",
    [
        *("--concurrency 0", "--concurrency 1,x"),
        *("--rtt-ms -1", "--rtt-ms nan", "--max-tokens 1", "--count 1.5", "--temperature 3", "--json /no/folder/x"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_name(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(wrong.split())
    assert f"argument {wrong.split()[0]}: must be" in capsys.readouterr().err
    assert parser.parse_args(["--concurrency", "4,1,4"]).concurrency == [4, 1]
