"""Test that a hostile chat template takes neither time nor memory from the process that needs its text."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import psutil
import pytest

from edge_agent.target import template_process
from edge_agent.target.chat_template import ChatTemplate
from outrider.core.errors import BadRequest, ModelRefused

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = {
    "nested loops": LOOPS,
    "list doubling": "{% set l = namespace(x=[0]) %}{% for i in range(40) %}{% set l.x = l.x + l.x %}{% endfor %}",
    "replace": "{% set l = namespace(x='x') %}{% for i in range(12) %}{% set l.x = l.x.replace('x', 'xxxxxxxxxx') %}"
    "{% endfor %}",
    "center": "{{ 'x'.center(10 ** 11) }}",
    "ljust": "{% for i in range(99999) %}{% set x = 'x'.ljust(10 ** 9) %}{% endfor %}",
}


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_ends_in_time_and_within_the_memory(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "RENDER_S", 2.0)
    template, begun, before = ChatTemplate(bomb), time.monotonic(), psutil.Process().memory_info().rss
    with pytest.raises((ModelRefused, BadRequest)):
        template.render(user("x"))
    assert time.monotonic() - begun < 8.0
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_the_next_rendering_after_one_without_end_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "RENDER_S", 1.0)
    template = ChatTemplate("{% if messages[0].content == 'bad' %}" + LOOPS + "{% endif %}" + PLAIN)
    assert template.render(user("one")) == "one"
    with pytest.raises(ModelRefused, match="takes longer than 1 s"):
        template.render(user("bad"))
    assert template.render(user("two")) == "two"


def test_one_child_renders_all_messages_and_ends_with_its_template() -> None:
    before = children()
    template = ChatTemplate(PLAIN)
    assert template.render(user("a")) == "a"
    [child] = children() - before
    begun = time.perf_counter()
    assert [template.render(user(str(number))) for number in range(50)] == [str(number) for number in range(50)]
    assert time.perf_counter() - begun < 2.0
    assert children() - before == {child}
    del template
    gc.collect()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_child_that_was_killed_is_replaced() -> None:
    before = children()
    template = ChatTemplate(PLAIN)
    template.render(user("a"))
    [child] = children() - before
    os.kill(child.pid, 9)
    child.wait()
    assert template.render(user("b")) == "b"


def test_messages_that_are_no_json_are_refused() -> None:
    with pytest.raises(BadRequest, match="must be JSON values"):
        ChatTemplate(PLAIN).render([{"role": "user", "content": object()}])
