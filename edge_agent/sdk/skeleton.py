"""Write an answer as an outline whose points are then expanded side by side (skeleton-of-thought, arXiv 2307.15337).

The prompts of all points begin alike: the caller's messages, the request for an outline, the outline. A verifier with a
prefix cache has that computed when the first point is asked for. A grammar holds the outline to a numbered list.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from edge_agent.sdk.generation import CompletionStream, Deadline, ItemStream
from edge_agent.sdk.request import Request, refuse
from edge_agent.sdk.types import Options, Skeleton, SkeletonPoint
from edge_agent.target.chat_template import Message
from outrider.core.errors import BadRequest, OutriderError

MAX_POINTS = 32
MAX_PARALLEL = 32
TITLE_CHARS = 80
OUTLINE_TOKENS = 32
"""Most tokens of the outline, for each of its points."""

_OUTLINE = (
    "{question}\n\nDo not answer yet. Write the outline of your answer: a numbered list of at most {points} points,"
    " each of three to eight words, and nothing else."
)
_POINT = (
    "Now write one point of this outline as it will stand in the answer, in one short paragraph. Write nothing about"
    " the other points, and repeat neither the number nor the title.\n\nThe point is: {number}. {title}"
)
_LINE = re.compile(r"^\d+\. *(\S.*)$", re.MULTILINE)
_REFUSED = ("grammar", "prompt_logprobs")

Begin = Callable[[Sequence[Message], Options, Deadline], Awaitable[CompletionStream]]
"""Starts a chat with these options, whose time is limited by a deadline that has begun already."""
Write = Callable[[str, int, str], Awaitable[CompletionStream]]
"""(outline, number, title) -> the point of this number and title, which begins to be written."""


def outline_grammar(points: int) -> str:
    """Return the grammar of a numbered list of one to `points` lines."""
    lines = ""
    for number in range(points, 0, -1):
        rest = f" ({lines})?" if lines else ""
        lines = f'"{number}. " TITLE "\\n"{rest}'
    return f"start: {lines}\nTITLE: /[^\\s][^\\n]{{1,{TITLE_CHARS - 1}}}/"


def titles(outline: str, points: int, *, cut: bool = False) -> list[str]:
    """Return the first points of an outline, without their numbers. Raises BadRequest if it has none.

    cut: whether the outline ended for its length; then a last line that was not finished is no point.
    """
    whole = outline[: outline.rfind("\n") + 1] if cut else outline
    found: list[str] = _LINE.findall(whole)[:points]
    if not found:
        raise BadRequest(
            f"the target wrote an outline without a point ({outline[:TITLE_CHARS]!r}); ask with chat() instead",
            field="messages",
        )
    return [title.strip() for title in found]


class SkeletonStream(ItemStream[SkeletonPoint]):
    """A skeleton that is being written, as `AsyncClient.stream_skeleton` returns it: iterate over it for its points.

    They come as they finish, in any order; `number` is a point's place. One that fails comes with its `error`, and the
    others continue. It has `next` and `aclose`, and leaving the iteration early, or the context, cancels all requests,
    as for CompletionStream.
    """

    def __init__(self, outline: CompletionStream, write: Write, points: int, parallel: int) -> None:
        """points: most of the outline. parallel: most that are written at the same time."""
        super().__init__(self._points())
        self._outline = outline
        self._write = write
        self._most = points
        self._room = asyncio.Semaphore(parallel)

    @property
    def skeleton(self) -> Skeleton:
        """Return the outline and the points that have come so far."""
        return Skeleton(self._outline.completion, tuple(sorted(self._taken, key=lambda point: point.number)))

    async def drain(self) -> Skeleton:
        """Run to the end, and return the skeleton.

        Raises the error of the first point that fails, with a note that names the point, and cancels the others;
        `skeleton` keeps those that had ended.
        """
        async with self:
            while (point := await self.next()) is not None:
                if point.error is not None:
                    point.error.add_note(f"while writing point {point.number} of the outline, {point.title!r}")
                    raise point.error
        return self.skeleton

    async def _points(self) -> AsyncGenerator[SkeletonPoint, None]:
        outline = await self._outline.drain()
        if outline.finish_reason == "cancelled":
            return
        found = titles(outline.text, self._most, cut=outline.finish_reason == "length")
        tasks = [asyncio.create_task(self._point(outline.text, i, title)) for i, title in enumerate(found, 1)]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _point(self, outline: str, number: int, title: str) -> SkeletonPoint:
        async with self._room:
            try:
                return SkeletonPoint(number, title, await (await self._write(outline, number, title)).drain())
            except OutriderError as error:
                return SkeletonPoint(number, title, None, error)


async def begun(
    begin: Begin, messages: Sequence[Message], options: Options, points: int, parallel: int
) -> SkeletonStream:
    """Begin the outline of a skeleton. Raises BadRequest for messages, bounds or options that cannot be used.

    points: most points of the outline. parallel: most points that are written at the same time.
    """
    most, side_by_side = _count("points", points, MAX_POINTS), _count("parallel", parallel, MAX_PARALLEL)
    for field in _REFUSED:
        if options.get(field) not in (None, ""):
            refuse(field, options[field], "left out: a skeleton is written by several requests")  # type: ignore[literal-required]
    last = messages[-1]
    where = f"messages[{len(messages) - 1}]"
    if last["role"] != "user":
        refuse(f"{where}.role", last["role"], "user: the last message is what is answered")
    if not isinstance(last["content"], str):
        refuse(f"{where}.content", last["content"], "a string: a skeleton quotes it")
    request = Request.of(**options)
    deadline = Deadline(request.timeout)
    # One seed for all: their prompts differ, and noise is keyed by seed and prompt.
    of_points: Options = {**options, "seed": request.sampling.seed}
    # What ends and scores a point's text does not hold for the outline.
    of_outline: Options = {
        **of_points,
        "max_tokens": OUTLINE_TOKENS * most,
        "grammar": outline_grammar(most),
        "min_tokens": 0,
        "stop": None,
        "stop_token_ids": (),
        "ignore_eos": False,
        "logprobs": None,
    }
    asked = [*messages[:-1], {**last, "content": _OUTLINE.format(question=last["content"], points=most)}]

    def write(outline: str, number: int, title: str) -> Awaitable[CompletionStream]:
        answered = {"role": "assistant", "content": outline}
        # The prompts of the points differ in their last words alone.
        point = {"role": "user", "content": _POINT.format(number=number, title=title)}
        return begin([*asked, answered, point], of_points, deadline.after_first_token())

    return SkeletonStream(await begin(asked, of_outline, deadline), write, most, side_by_side)


def _count(field: str, value: object, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        refuse(field, value, f"an integer from 1 to {most}")
    return value
