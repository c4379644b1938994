"""Fit any list of chat messages to any chat template, by trying.

Templates differ in what they take: no system role, one system message at the beginning, strict turns of user and
assistant, no tools, call ids of nine letters. Some refuse what they do not take, and others leave it out of the prompt
without a word. So the messages are rendered with marks in the place of their texts first, in one form after another,
each further from what was given, until every mark is in the prompt once and in order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pydantic_core

from outrider.core.errors import BadRequest

Turn = dict[str, Any]
"""A message as templates expect it: `role`, `content` as text, and for tools `tool_calls` and `tool_call_id`."""
Tools = Sequence[Mapping[str, Any]]
Form = Callable[[list[Turn], Tools], tuple[list[Turn], Tools]]
"""Returns messages and tools in the form that a template may take."""
Change = Callable[[list[Turn]], list[Turn]]

_ROLES = ("system", "user", "assistant", "tool")
_TOOLS_TEXT = (
    "You can call functions. To call some, answer with nothing but a JSON list of calls, such as "
    '[{"name": "function", "arguments": {"argument": "value"}}]. The functions are:'
)


class Arguments(dict[str, Any]):
    """A call's arguments, for templates that take them as a mapping, and for those that take them as JSON text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return f"{self}{text}"

    def __radd__(self, text: str) -> str:
        return f"{text}{self}"


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Return the messages with contents as text, a refusal's included, arguments of calls as objects, `function_call`,
    `function` and `developer` by their present names, and no empty fields.

    Raises BadRequest for a call whose arguments are no JSON object.
    """
    turns: list[Turn] = []
    asked = ""
    """Id of the `function_call` whose result is still to come."""
    for number, message in enumerate(messages):
        turn = {name: value for name, value in message.items() if value not in (None, [], ())}
        turn["role"] = {"function": "tool", "developer": "system"}.get(turn["role"], turn["role"])
        content = turn.get("content")
        if isinstance(content, list | tuple):
            content = "".join(map(text_of_part, content))
        turn["content"] = "\n\n".join(filter(None, (content, turn.pop("refusal", None))))
        called = turn.pop("function_call", None)
        if calls := turn.get("tool_calls"):
            turn["tool_calls"] = [_call(call, f"messages[{number}].tool_calls[{i}]") for i, call in enumerate(calls)]
        elif called is not None:
            asked = f"call_{number}"
            call = {"id": asked, "type": "function", "function": called}
            turn["tool_calls"] = [_call(call, f"messages[{number}]", "function_call")]
        elif turn["role"] == "tool" and asked:
            turn.setdefault("tool_call_id", asked)
            asked = ""
        turns.append(turn)
    return turns


def text_of_part(part: Any) -> str:
    """Return the text of a part of a content."""
    return part if isinstance(part, str) else part.get("text") or part.get("refusal") or ""


def _call(call: Mapping[str, Any], field: str, name: str = "function") -> Turn:
    given = call["function"].get("arguments")
    try:
        value = (_parsed(given) if given.strip() else {}) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        value = given
    if not isinstance(value, Mapping | None):
        raise BadRequest(f"{field}.{name}.arguments is {given!r:.80}, must be a JSON object", field=field)
    kept = {name: value for name, value in call.items() if value is not None}
    return {**kept, "function": {**call["function"], "arguments": Arguments(value or {})}}


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; of an object that breaks off, as that of an answer that was cut, what is there.

    Raises ValueError, RecursionError.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" or not text.lstrip().startswith("{"):
            raise
        return pydantic_core.from_json(text, allow_partial="trailing-strings")


def fitted(render: Callable[[list[Turn], Tools], str], turns: list[Turn], tools: Tools) -> str:
    """Return the prompt in the first form in which the template renders every text once and in order, else in the first
    that it renders.

    Raises BadRequest, with the template's words about the messages as they are, if it refuses every form.
    """
    refusals: list[BadRequest] = []

    def rendered(turns: list[Turn], tools: Tools) -> str | None:
        try:
            return render(turns, tools)
        except BadRequest as error:
            refusals.append(error)
            return None

    others: list[Form] = []
    forms = _forms(turns, tools, in_parts=_takes_parts(render))
    for form, whole in _judged(rendered, forms, turns, tools):
        if not whole:
            others.append(form)
        elif (text := rendered(*form(turns, tools))) is not None:  # the texts may have what the marks have not
            return text
    for form in others:
        if (text := rendered(*form(turns, tools))) is not None:
            return text
    raise refusals[0]


def _judged(
    rendered: Callable[[list[Turn], Tools], str | None], forms: Iterator[Form], turns: list[Turn], tools: Tools
) -> Iterator[tuple[Form, bool]]:
    """Yield the forms that the template renders, and whether every text, call and tool is there and in its place."""
    marked, said, hoisted, called = _marked(turns)
    described: list[Mapping[str, Any]] = []
    for tool in tools:
        function, mark = tool["function"], new_mark()
        field = "description" if function.get("description") else "name"
        described.append({**tool, "function": {**function, field: mark}})
        called.add(mark)
    ordered = set(said)
    for form in forms:
        given, defined = form(marked, described)
        if (text := rendered(given, defined)) is None:
            continue
        found = _MARK.findall(text)
        counts = Counter(found)
        in_order = [mark for mark in found if mark in ordered] == said
        whole = all(counts[mark] == 1 for mark in hoisted) and called <= counts.keys()
        word = "None" in text and any(turn["content"] is None for turn in given)
        yield form, in_order and whole and not word


def _takes_parts(render: Callable[[list[Turn], Tools], str]) -> bool:
    """Return whether the template leaves out a text, but not one that comes as a list of parts."""
    plain: Turn = {"role": "user", "content": new_mark()}

    def rendered(turn: Turn) -> bool:
        try:
            return plain["content"] in render([turn], ())
        except BadRequest:
            return False

    return not rendered(plain) and rendered(_in_parts(plain))


def _in_parts(turn: Turn) -> Turn:
    return turn if turn["content"] is None else {**turn, "content": [{"type": "text", "text": turn["content"]}]}


def new_mark() -> str:
    """Return a word that no other call returns."""
    return f"mark{next(_numbers):016x}"


_numbers = itertools.count(1)
_MARK = re.compile("mark[0-9a-f]{16}")


def _marked(turns: Sequence[Turn]) -> tuple[list[Turn], list[str], list[str], set[str]]:
    """Return the messages with marks for texts, and the marks: those that must keep their order, those of system
    messages, which a template may put elsewhere, and those of calls, which it may write more than once.

    What the assistant thought is not marked: templates may leave it out.
    """
    marked: list[Turn] = []
    said: list[str] = []
    hoisted: list[str] = []
    called: set[str] = set()
    for turn in turns:
        turn = dict(turn)
        if turn["content"].strip():
            turn["content"] = new_mark()
            (hoisted if turn["role"] == "system" else said).append(turn["content"])
        if calls := turn.get("tool_calls"):
            turn["tool_calls"] = []
            for call in calls:
                mark, arguments = new_mark(), Arguments(call["function"]["arguments"])
                name = call["function"]["name"] if arguments else mark
                arguments |= dict.fromkeys(list(arguments)[:1], mark)
                called.add(mark)
                function = {**call["function"], "name": name, "arguments": arguments}
                turn["tool_calls"].append({**call, "function": function})
        marked.append(turn)
    return marked, said, hoisted, called


def _forms(turns: Sequence[Turn], tools: Tools, *, in_parts: bool) -> Iterator[Form]:
    """Yield the forms to try, those that change least first. in_parts: each content is to be a list of parts."""
    calls = any(turn.get("tool_calls") or turn["role"] == "tool" for turn in turns)
    lacking = [_filled(tool) for tool in tools] != list(tools)

    def form(arrange: Change, changes: Sequence[Change], *, filled: bool = False, told: bool = False) -> Form:
        def formed(turns: list[Turn], tools: Tools) -> tuple[list[Turn], Tools]:
            if filled:
                tools = [_filled(tool) for tool in tools]
            if told:
                turns, tools = _told(turns, tools), ()
            for change in (*changes, arrange):
                turns = change(turns)
            return [_in_parts(turn) for turn in turns] if in_parts else turns, tools

        return formed

    changes = (_calls_apart, _without_empty_texts, _short_ids) if calls else ()
    for arrange in _ARRANGEMENTS:
        for some in itertools.chain(*(itertools.combinations(changes, number) for number in range(len(changes) + 1))):
            yield from (form(arrange, some, filled=filled) for filled in (False, True)[: 1 + lacking])
    if calls or tools:
        yield from (form(arrange, (), told=True) for arrange in _ARRANGEMENTS)


# --- arrangements of the turns, each further from what was given


def _joined(turns: list[Turn]) -> list[Turn]:
    """Join what users, or systems, say one after another."""
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn["role"] in ("user", "system") and turn["role"] == joined[-1]["role"]:
            joined[-1] = _merged(joined[-1], turn)
        else:
            joined.append(turn)
    return joined


def _system_first(turns: list[Turn]) -> list[Turn]:
    """Have later system messages begin the next user's, or end the last one's, and other roles speak as the user."""
    known = [turn if turn["role"] in _ROLES else {**turn, "role": "user"} for turn in turns]
    first = next((i for i, turn in enumerate(known) if turn["role"] != "system"), len(known))
    late = [{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in known[first:]]
    return _joined([*known[:first], *late])


def _alternating(turns: list[Turn]) -> list[Turn]:
    """Have users and assistants take turns: empty answers go, neighbours are joined, and the user begins."""
    arranged: list[Turn] = []
    for turn in _system_first([turn for turn in turns if not _says_nothing(turn)]):
        last = arranged[-1] if arranged else {"role": "system"}
        if turn["role"] == "assistant" and last["role"] == "system":
            arranged.append({"role": "user", "content": ""})
        elif turn["role"] == "assistant" == last["role"]:
            if not last.get("tool_calls") and not last.get("apart"):
                arranged[-1] = {**last, **turn, "content": _merged(last, turn)["content"]}
                continue
            arranged.append({"role": "user", "content": ""})
        elif turn["role"] == "user" and last["role"] == "tool":
            arranged.append({"role": "assistant", "content": ""})
        arranged.append(turn)
    return _joined(arranged) or [{"role": "user", "content": ""}]


def _without_system(turns: list[Turn]) -> list[Turn]:
    """Have the system's text begin the first user's, and turns alternate."""
    return _alternating([{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns])


_ARRANGEMENTS: Sequence[Change] = (list, _joined, _system_first, _alternating, _without_system)


def _says_nothing(turn: Turn) -> bool:
    return turn["role"] == "assistant" and not (turn["content"] or turn.get("tool_calls"))


def _merged(first: Turn, second: Turn) -> Turn:
    """Return a turn that says what both say."""
    return {**first, "content": "\n\n".join(filter(None, (first["content"], second["content"])))}


# --- calls


def _filled(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool with a description and parameters, be they empty: some templates take no other."""
    function = tool["function"]
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    description = function.get("description") or ""
    return {**tool, "function": {**function, "description": description, "parameters": parameters}}


def _calls_apart(turns: list[Turn]) -> list[Turn]:
    """Have a text before calls, and each of several calls with its results, be turns of their own: Llama 3's template
    takes one call a turn, and leaves out the text beside it."""
    apart: list[Turn] = []
    rest = deque(turns)
    while rest:
        turn = rest.popleft()
        calls = turn.get("tool_calls")
        if not calls:
            apart.append(turn)
            continue
        if turn["content"]:
            said = {name: value for name, value in turn.items() if name != "tool_calls"}
            apart.append({**said, "apart": True})  # so that no arrangement joins it with its calls
            turn = {"role": turn["role"], "content": ""}
        results: list[Turn] = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        for call in calls:
            apart.append({**turn, "tool_calls": [call]})
            if id_ := call.get("id"):
                apart += [one for one in results if one.get("tool_call_id") == id_]
                results = [one for one in results if one.get("tool_call_id") != id_]
            else:
                apart += results[:1]
                results = results[1:]
        apart += results
    return apart


def _without_empty_texts(turns: list[Turn]) -> list[Turn]:
    """Have turns with calls alone no content, by which DeepSeek's template tells that there are calls."""
    return [{**turn, "content": turn["content"] or None} if turn.get("tool_calls") else turn for turn in turns]


def _short_ids(turns: list[Turn]) -> list[Turn]:
    """Give calls and results ids of nine letters and digits, as Mistral's templates demand."""
    changed: list[Turn] = []
    asked: list[str] = []
    """Ids of the calls whose results are still to come, for results that name none."""
    for number, turn in enumerate(turns):
        if calls := turn.get("tool_calls"):
            ids = [_short(call.get("id") or f"{number}.{i}") for i, call in enumerate(calls)]
            asked = list(ids)
            turn = {**turn, "tool_calls": [{**call, "id": id_} for call, id_ in zip(calls, ids, strict=True)]}
        elif turn["role"] == "tool":
            id_ = _short(turn["tool_call_id"]) if turn.get("tool_call_id") else next(iter(asked), _short(str(number)))
            asked = [one for one in asked if one != id_]
            turn = {**turn, "tool_call_id": id_}
        changed.append(turn)
    return changed


def _short(id_: object) -> str:
    return hashlib.sha256(str(id_).encode(errors="replace")).hexdigest()[:9]


def _told(turns: list[Turn], tools: Tools) -> list[Turn]:
    """Return the messages with tools, calls and results as text, for a template that knows none of them."""
    told: list[Turn] = []
    results_follow = False
    for turn in turns:
        role, content = turn["role"], turn["content"]
        if calls := turn.get("tool_calls"):
            parts = [{"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in calls]
            content = "\n".join(filter(None, (content, json.dumps(parts, ensure_ascii=False))))
        if role == "tool":
            if results_follow:
                content = f"{told.pop()['content']}\n{content}"
            role = "user"
        results_follow = turn["role"] == "tool"
        kept = {name: value for name, value in turn.items() if name not in ("tool_calls", "tool_call_id", "name")}
        told.append({**kept, "role": role, "content": content})
    if tools:
        text = "\n".join((_TOOLS_TEXT, *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)))
        if told and told[0]["role"] == "system":
            text = f"{told.pop(0)['content']}\n\n{text}"
        told.insert(0, {"role": "system", "content": text})
    return told
