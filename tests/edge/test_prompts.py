"""Test which files of prompts are read, and what is said about those that cannot be."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from edge_agent.prompts import MAX_TURNS, Prompt, mixed, read_prompts
from outrider.core.errors import BadRequest

SHAREGPT = [
    {"id": "a_0", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"id": "a_1", "conversations": [{"from": "gpt", "value": "... as I said"}, {"from": "human", "value": "go on"}]},
    {"id": "b_0", "conversations": []},
    {"id": "b_1", "conversations": [{"from": "human", "value": " "}, {"from": "gpt", "value": "Hello"}]},
    {
        "id": "c_0",
        "conversations": [
            {"from": "system", "value": "Be short."},
            {"from": "human", "value": "One"},
            {"from": "gpt", "value": "1"},
            {"from": "human", "value": "Two"},
        ],
    },
]
OURS = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"


def written(folder: Path, *rows: object) -> Path:
    file = folder / "some.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


def test_our_own_prompts_are_of_seven_categories_and_no_two_are_alike() -> None:
    prompts = read_prompts(OURS)
    assert Counter(prompt.category for prompt in prompts) == {
        **dict.fromkeys(("translation", "summary", "question answering", "retrieval"), 12),
        **dict.fromkeys(("chat", "reasoning", "code"), 16),
    }
    assert len({prompt.turns[0] for prompt in prompts}) == 96
    assert all(len(prompt.turns) == (2 if prompt.category == "chat" else 1) for prompt in prompts)


def test_rows_of_well_known_benchmarks_are_read(tmp_path: Path) -> None:
    rows = (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."], "reference": ["x"]},
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass"},
        "",
        {"question": "How many?", "answer": "2"},
        SHAREGPT[0],
    )
    assert read_prompts(written(tmp_path, *rows)) == [
        Prompt("81", "mt-bench", ("Write.", "Rewrite.")),
        Prompt("HumanEval/0", "some", ("def f():\n",)),
        Prompt("some-4", "some", ("How many?",)),
        Prompt("a_0", "some", ("Hi",)),
    ]


def test_sharegpt_is_read_as_an_array_without_what_no_human_begins_or_says(tmp_path: Path) -> None:
    file = written(tmp_path, json.dumps(SHAREGPT, indent=1))
    assert [(prompt.id, prompt.turns) for prompt in read_prompts(file)] == [("a_0", ("Hi",)), ("c_0", ("One", "Two"))]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (['{"prompt": "a"}', "{"], "line 2: is no JSON"),
        (["[" * 100_000], "line 1: is no JSON"),
        (["[[1]]"], "entry 1: is [1], must be a JSON object"),
        ([{"conversations": "a"}], "line 1: turns: Field required"),
        ([{"conversations": [{"from": "human"}]}], "line 1: turns: 0: Input should be a valid string"),
        (["3"], "line 1: is 3, must be a JSON object"),
        ([{"text": "a"}], "line 1: turns: Field required"),
        ([{"turns": []}], "line 1: turns: Value should have at least 1 item"),
        ([{"turns": 1}], "line 1: turns: Input should be a valid list"),
        ([{"turns": ["a"] * (MAX_TURNS + 1)}], "line 1: turns: Value should have at most 256 items"),
        ([{"prompt": " "}], "line 1: prompt: 0: String should match"),
        ([{"prompt": None}], "line 1: prompt: Input should be a valid list"),
        (['{"prompt": "\\ud800"}'], "line 1: is no JSON"),
        ([{"id": 1.5, "prompt": "a"}], "line 1: id: "),
        ([{"category": 1, "prompt": "a"}], "line 1: category: Input should be a valid string"),
        ([{"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}], "line 2: the id '1' is an earlier row's"),
        ([], "has no prompt"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_file_and_line(tmp_path: Path, rows: list[object], said: str) -> None:
    file = written(tmp_path, *rows)
    with pytest.raises(BadRequest) as refusal:
        read_prompts(file)
    assert str(file) in str(refusal.value)
    assert said in str(refusal.value)


def test_bytes_that_are_no_text_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(BadRequest, match=r"bytes\.jsonl, line 1: is no JSON"):
        read_prompts(tmp_path / "bytes.jsonl")
    with pytest.raises(BadRequest, match=r"none\.jsonl cannot be read: No such file"):
        read_prompts(tmp_path / "none.jsonl")


def test_a_few_prompts_are_of_all_categories() -> None:
    prompts = [Prompt(f"{category}{i}", category, ("?",)) for category in "abc" for i in range(2 + (category == "b"))]
    assert [prompt.id for prompt in mixed(prompts)] == ["a0", "b0", "c0", "a1", "b1", "c1", "b2"]
