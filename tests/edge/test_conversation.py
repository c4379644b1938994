"""Test that every conversation is rendered by templates in the manner of those that people run, with each text once."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.target.chat_template import ChatTemplate
from edge_agent.target.conversation import turns_of
from outrider.core.errors import BadRequest

_ALTERNATES = (
    "{%- set ns = namespace(n=0) %}{%- for m in messages if m.role in ['user', 'assistant'] and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.n = ns.n + 1 %}{%- endfor %}"
)
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "smollm2": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    ),
    "mistral, old": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('only user and assistant roles') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant/...') }}{% endif %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>"
        "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
    ),
    "mistral, new": _ALTERNATES
    + (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{% if loop.last and tools %}[TOOLS]{{ tools | tojson }}{% endif %}"
        "[INST]{{ m.content }}[/INST]{% elif m.role == 'system' %}{% if not loop.first %}"
        "{{ raise_exception('system first') }}{% endif %}[SYS]{{ m.content }}[/SYS]"
        "{% elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('call ids should have 9 letters') }}{% endif %}[CALL]{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}</s>"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% elif m.role == 'tool' %}"
        "{% if m.tool_call_id | length != 9 %}{{ raise_exception('call ids should have 9 letters') }}{% endif %}"
        "[RESULT]{{ m.content }}[/RESULT]{% else %}{{ raise_exception('which role?') }}{% endif %}{% endfor %}"
    ),
    "llama 3": (
        "{% if messages[0].role == 'system' %}{% set said = messages[0].content | trim %}"
        "{% set messages = messages[1:] %}{% else %}{% set said = '' %}{% endif %}<|system|>{{ said }}<|eot|>"
        "{% if tools %}{% if not messages %}{{ raise_exception('no first user message') }}{% endif %}"
        "<|user|>{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{{ messages[0].content | trim }}<|eot|>"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}{% if not (m.role == 'tool' or 'tool_calls' in m) %}"
        "<|{{ m.role }}|>{{ m.content | trim }}<|eot|>{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('only single calls') }}{% endif %}<|assistant|>{{ m.tool_calls[0].function.name }}"
        "{% for name, value in m.tool_calls[0].function.arguments | items %}{{ name }}={{ value }}{% endfor %}<|eot|>"
        "{% else %}<|ipython|>{{ m.content }}<|eot|>{% endif %}{% endfor %}"
    ),
    "qwen": (
        "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% elif messages[0].role == 'system' %}"
        "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' or m.role == 'system' and not loop.first %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
        "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
        "<|im_end|>\n{% endif %}{% endfor %}"
    ),
    "gemma 2": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<start>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
    ),
    "gemma 3": (
        "{% if messages[0].role == 'system' %}{% set prefix = messages[0].content + '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<start>{{ m.role }}\n{{ prefix if loop.first }}"
        "{{ m.content | trim }}<end>\n{% endfor %}"
    ),
    "deepseek": (
        "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}"
        "{% set ns.system = ns.system + m.content %}{% endfor %}{{ ns.system }}"
        "{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}{% endif %}"
        "{% if m.role == 'assistant' and m.content is none %}<Assistant>{% for c in m.tool_calls %}"
        "<call>{{ c.function.name }}\n{{ c.function.arguments + '' }}{% endfor %}{% endif %}"
        "{% if m.role == 'assistant' and m.content is not none %}<Assistant>{{ m.content }}<eos>{% endif %}"
        "{% if m.role == 'tool' %}<output>{{ m.content }}</output>{% endif %}{% endfor %}"
    ),
    "glm": (
        "[gMASK]{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>"
        "{% endfor %}</tool_call>{% endfor %}{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    ),
    "phi": (
        "{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content }}<|end|>{% elif m.role == 'user' %}"
        "<|user|>{{ m.content }}<|end|>{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}"
    ),
    "gpt-oss": (
        "{% if messages[0].role in ['system', 'developer'] %}{% set told = messages[0].content %}"
        "{% set messages = messages[1:] %}{% else %}{% set told = '' %}{% endif %}"
        "<|start|>developer<|message|>{{ told }}{% for t in tools or [] %}{{ '// ' + t.function.description }}\n"
        "type {{ t.function.name }}{% endfor %}<|end|>{% set last = namespace(call=none) %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{% for key in ['content', 'thinking'] %}"
        "{% if key in m and '<|channel|>' in m[key] %}{{ raise_exception('no channels in a message') }}{% endif %}"
        "{% endfor %}{% if 'tool_calls' in m %}{% set final = namespace(follows=false) %}"
        "{% for later in messages[loop.index:] if later.role == 'assistant' and 'tool_calls' not in later %}"
        "{% set final.follows = true %}{% endfor %}{% if m.content and m.thinking %}"
        "{{ raise_exception('a text or a thought, not both') }}{% elif not final.follows %}"
        "{% if m.content %}<|channel|>analysis{{ m.content }}{% elif m.thinking %}<|channel|>analysis{{ m.thinking }}"
        "{% endif %}{% endif %}{% set last.call = m.tool_calls[0].function.name %}"
        "<|start|>to={{ last.call }}{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% else %}<|start|>assistant{{ m.content }}<|end|>{% set last.call = none %}{% endif %}"
        "{% elif m.role == 'tool' %}{% if last.call is none %}{{ raise_exception('no call before') }}{% endif %}"
        "<|start|>functions.{{ last.call }}{{ m.content | tojson }}<|end|>"
        "{% elif m.role == 'user' %}<|start|>user{{ m.content }}<|end|>{% endif %}{% endfor %}"
    ),
    "phi 4 mini": (
        "{% if documents is defined %}{% for one in documents %}{{ one.text }}{% endfor %}{% endif %}"
        "{% if tools is defined %}<|tool|>{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}"
        "{% for name in t.function.parameters.properties.keys() %} {{ name }}{% endfor %}\n{% endfor %}<|/tool|>"
        "{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tells the weather.", "parameters": {"type": "object"}},
    }
]
BARE_TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def call(number: int, arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw messages of all roles in any order, with results of calls, in the shapes that clients send; every text is
    another word, or empty."""
    messages: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 7))):
        role = draw(
            st.sampled_from(["system", "developer", "user", "user", "assistant", "assistant", "calls", "old", "tool"])
        )
        text = draw(st.sampled_from([f"word{number}x", f"word{number}x", "", None]))
        thought = {"reasoning_content": draw(st.sampled_from([None, "", f"thought{number}x"]))}
        if role == "old":
            called = {"name": "weather", "arguments": json.dumps({"city": f"city{number}x0x"})}
            messages.append({"role": "assistant", "content": text, "function_call": called, **thought})
            messages.append({"role": "function", "name": "weather", "content": f"result{number}x0x"})
            continue
        if role != "calls":
            said = draw(
                st.sampled_from(["content", "parts", "refusal"] if role == "assistant" else ["content", "parts"])
            )
            message: dict[str, Any] = {
                "role": role,
                "content": text or "",
                "tool_calls": draw(st.sampled_from([None, []])),
            }
            if said == "parts":
                message["content"] = [{"type": "text", "text": text or ""}, {"type": "refusal", "refusal": ""}]
            elif said == "refusal":
                message |= {"content": None, "refusal": text}
            messages.append(message | (thought if role == "assistant" else {}))
            continue
        calls = [
            call(10 * number + i, draw(st.sampled_from(["{}", json.dumps({"city": f"city{number}x{i}x"})])))
            for i in range(draw(st.integers(1, 2)))
        ]
        messages.append({"role": "assistant", "content": text, "tool_calls": calls, **thought})
        if not draw(st.booleans()):
            calls = [one | {"id": None} for one in calls]
        results = [
            {"role": "tool", "tool_call_id": one["id"], "content": f"result{number}x{i}x"}
            for i, one in enumerate(calls)
        ]
        messages += results
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(messages=conversations(), tools=st.sampled_from([None, TOOLS, BARE_TOOLS]))
def test_every_text_of_any_conversation_is_in_the_prompt_once_and_in_order(
    name: str, messages: list[dict[str, Any]], tools: Any
) -> None:
    text = ChatTemplate(TEMPLATES[name]).render(messages, {"tools": tools})
    said = [word for message in messages for word in words(message) if message["role"] not in ("system", "developer")]
    told = [word for message in messages for word in words(message) if message["role"] in ("system", "developer")]
    assert [text.count(word) for word in (*said, *told)] == [1] * len((*said, *told)), text
    contents = [words(message)[0] for message in messages if words(message) and words(message)[0] in said]
    contents = [word for word in contents if not word.startswith("city")]
    assert contents == sorted(contents, key=text.index), text
    results = [word for word in contents if word.startswith("result") and word.replace("result", "city") in said]
    assert all(text.index(word.replace("result", "city")) < text.index(word) for word in results), text
    assert "None" not in text
    assert not tools or "weather" in text


def words(message: dict[str, Any]) -> list[str]:
    """Return the words of a message's text and of its calls' arguments."""
    called = [one["function"] for one in message.get("tool_calls") or ()]
    called += [message["function_call"]] if "function_call" in message else []
    content = message["content"] or message.get("refusal")
    said = content[0]["text"] if isinstance(content, list) else content
    return [word for word in (said, *(json.loads(one["arguments"]).get("city") for one in called)) if word]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_calls_of_gpt_oss_are_in_its_own_form_with_a_thought_or_without() -> None:
    asked: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call(1, "{}")]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    for thought, written in (({}, ""), ({"reasoning_content": "Hm."}, "<|channel|>analysisHm.")):
        text = ChatTemplate(TEMPLATES["gpt-oss"]).render(
            [user("a"), {**asked, **thought}, result], {"tools": BARE_TOOLS}
        )
        assert "// \ntype weather<|end|>" in text
        assert text.endswith(f'{written}<|start|>to=weather{{}}<|call|><|start|>functions.weather"sunny"<|end|>')


def test_texts_that_a_template_refuses_in_its_own_form_are_rendered_in_the_next() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.function.arguments.city is not string %}"
        "{{ raise_exception('no city') }}{% endif %}<{{ c.function.arguments.city }}>{% endfor %}"
        "{{ m.content }}{% endfor %}"
    )
    asked = {"role": "assistant", "content": "", "tool_calls": [call(1, '{"city": 3}')]}
    assert ChatTemplate(source).render([user("a"), asked]) == 'a[{"name": "weather", "arguments": {"city": 3}}]'


def test_a_call_without_arguments_is_not_lost() -> None:
    messages = [user("a"), {"role": "assistant", "content": "", "tool_calls": [call(1, "{}")]}]
    assert '"name": "weather"' in ChatTemplate(TEMPLATES["chatml"]).render(messages)


@pytest.mark.parametrize("of_refusal", ["refusal", "content"])
def test_the_text_of_a_refusal_is_kept(of_refusal: str) -> None:
    parts: Any = {"refusal": "No.", "content": [{"type": "refusal", "refusal": "No."}]}[of_refusal]
    text = ChatTemplate(TEMPLATES["chatml"]).render([user("a"), {"role": "assistant", of_refusal: parts}])
    assert text.count("No.") == 1


def test_a_function_call_of_old_is_a_call_that_the_functions_message_answers() -> None:
    asked = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages = [user("a"), asked, {"role": "function", "name": "weather", "content": "sunny"}, user("b")]
    _, asks, answers, _ = turns_of(messages)
    assert asks["tool_calls"][0]["id"] == answers["tool_call_id"] and answers["role"] == "tool"
    assert '"arguments": {"city": "Ulm"}' in ChatTemplate(TEMPLATES["qwen"]).render(messages)
    asked["function_call"] = {"name": "weather", "arguments": "[]"}
    with pytest.raises(BadRequest, match=r"messages\[1\]\.function_call\.arguments"):
        turns_of(messages)


def test_a_system_message_and_tools_begin_the_first_users_where_there_is_no_such_role() -> None:
    template = ChatTemplate(TEMPLATES["gemma 2"])
    assert (
        template.render([{"role": "system", "content": "Be short."}, user("Hi")])
        == "<start>user\nBe short.\n\nHi<end>\n"
    )
    assert "weather" in template.render([user("Hi")], {"tools": TOOLS}).split("Hi")[0]


def test_a_late_instruction_joins_its_neighbour() -> None:
    messages = [
        user("a"),
        {"role": "assistant", "content": "b"},
        {"role": "developer", "content": "be brief"},
        user("c"),
    ]
    text = ChatTemplate(TEMPLATES["mistral, new"]).render(messages)
    assert text == "[INST]a[/INST]b</s>[INST]be brief\n\nc[/INST]"


@pytest.mark.parametrize("given", ["", " ", "null", None, "{}"])
@pytest.mark.parametrize("written", ["{{ c | items | list }}", "{{ c | tojson }}"])
def test_no_arguments_of_a_call_are_an_empty_object(given: str | None, written: str) -> None:
    source = "{% for c in messages[1].tool_calls | map(attribute='function.arguments') %}" + written + "{% endfor %}"
    text = ChatTemplate(source).render(
        [user("a"), {"role": "assistant", "content": "", "tool_calls": [call(1, given)]}]
    )
    assert text in ("[]", "{}")


@pytest.mark.parametrize(
    ("given", "kept"),
    [("{", {}), ('{"city": "Kö', {"city": "Kö"}), ('{"a": [1, 2], "b', {"a": [1, 2]}), ('{"a": {"b": tr', {"a": {}})],
)
def test_of_arguments_that_broke_off_what_is_there_is_rendered(given: str, kept: Any) -> None:
    messages = [user("a"), {"role": "assistant", "content": "", "tool_calls": [call(1, given)]}, user("Go on.")]
    assert f'"arguments": {json.dumps(kept, ensure_ascii=False)}}}' in ChatTemplate(TEMPLATES["qwen"]).render(messages)


@pytest.mark.parametrize("given", ["[]", '{"a": 1} or', "3", '"x"', [1]])
def test_arguments_that_are_no_object_are_refused_by_the_calls_place(given: Any) -> None:
    messages = [user("a"), {"role": "assistant", "content": "", "tool_calls": [call(1, "{}"), call(2, given)]}]
    with pytest.raises(BadRequest, match=r"messages\[1\]\.tool_calls\[1\]"):
        ChatTemplate(TEMPLATES["qwen"]).render(messages)


def test_a_text_and_two_calls_are_turns_of_their_own_where_a_turn_takes_one_call() -> None:
    calls = [call(1, '{"city": "Ulm"}'), call(2, '{"city": "Bonn"}')]
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": f"result {i}"} for i in (1, 2)]
    messages = [user("a"), {"role": "assistant", "content": "Wait.", "tool_calls": calls}, *results]
    text = ChatTemplate(TEMPLATES["llama 3"]).render(messages)
    assert text.endswith(
        "<|assistant|>Wait.<|eot|><|assistant|>weathercity=Ulm<|eot|><|ipython|>result 1<|eot|>"
        "<|assistant|>weathercity=Bonn<|eot|><|ipython|>result 2<|eot|>"
    )


def test_a_text_beside_a_call_does_not_keep_a_template_from_its_own_form_of_calls() -> None:
    messages = [
        user("a"),
        {"role": "assistant", "content": "Wait.", "tool_calls": [call(1, '{"city": "Ulm"}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
        user("And?"),
    ]
    text = ChatTemplate(TEMPLATES["mistral, new"]).render(messages, {"tools": TOOLS})
    assert text.startswith('[INST]a[/INST]Wait.</s>[INST][/INST][CALL]weather{"city": "Ulm"}') and "[TOOLS]" in text


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template", [PARTS, "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"]
)
def test_a_template_that_takes_parts_alone_gets_parts(template: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("a"), {"role": "assistant", "content": "b"}]
    assert ChatTemplate(template).render(messages) == "<system>Be brief.<user>a<assistant>b"
    assert ChatTemplate(template).render(messages, {"continue_final_message": True}).endswith("<assistant>b")
    assert "weather" in ChatTemplate(template).render(messages, {"tools": TOOLS})


def test_a_control_token_that_a_calls_json_hides_stays_plain_text() -> None:
    hidden = '{"city": "\\u003c|im_end|>"}'
    messages = [user("a"), {"role": "assistant", "content": "", "tool_calls": [call(1, hidden)]}]
    plain: list[str] = []
    ids = ChatTemplate(TEMPLATES["qwen"]).tokenise(
        messages, lambda text: [text.count("<|im_end|>")], lambda text: plain.append(text) or [0], ["<|im_end|>"]
    )
    assert plain == ["<|im_end|>"] and sum(ids) == len(messages)


def test_a_chat_of_thousands_of_messages_is_fitted_soon() -> None:
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant")] * 20_000
    begun = time.process_time()
    ChatTemplate(TEMPLATES["chatml"]).render(messages)
    assert time.process_time() - begun < 10.0


def test_the_last_turn_is_continued() -> None:
    messages = [user("Count."), {"role": "assistant", "content": "One, two, "}]
    text = ChatTemplate(TEMPLATES["qwen"]).render(messages, {"continue_final_message": True})
    assert text == "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\nOne, two, "
    text = ChatTemplate(TEMPLATES["gemma 2"]).render(messages, {"continue_final_message": True})
    assert text.endswith("One, two,")
    messages[-1] = {"role": "assistant", "content": "e"}  # which the end of a turn has, too
    text = ChatTemplate(TEMPLATES["chatml"]).render(messages, {"continue_final_message": True})
    assert text.endswith("<|im_start|>assistant\ne")


@pytest.mark.parametrize("content", ["", " "])
def test_a_last_turn_without_a_text_is_not_continued(content: str) -> None:
    messages = [user("Count."), {"role": "assistant", "content": content}]
    with pytest.raises(BadRequest, match="the last message has no text"):
        ChatTemplate(TEMPLATES["qwen"]).render(messages, {"continue_final_message": True})


def test_a_role_that_is_called_function_is_a_tools() -> None:
    messages = [user("a"), {"role": "assistant", "content": "", "tool_calls": [call(1, "{}")]}]
    text = ChatTemplate(TEMPLATES["qwen"]).render(
        [*messages, {"role": "function", "name": "weather", "content": "sunny"}]
    )
    assert "<tool_response>sunny</tool_response>" in text
