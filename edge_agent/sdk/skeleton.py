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


class SkeletonPlan:
    """The requests of one skeleton. Raises BadRequest for messages, bounds or options that cannot be used.

    points: most points of the outline. parallel: most points that are written at the same time.
    """

    def __init__(self, messages: Sequence[Message], options: Options, points: int, parallel: int) -> None:
        self._points = _count("points", points, MAX_POINTS)
        self.parallel = _count("parallel", parallel, MAX_PARALLEL)
        for field in _REFUSED:
            if options.get(field) not in (None, ""):
                refuse(field, options[field], "left out: a skeleton is written by several requests")  # type: ignore[literal-required]
        last = messages[-1]
        if last["role"] != "user" or not isinstance(last["content"], str):
            refuse(f"messages[{len(messages) - 1}].role", last["role"], "user: the last message is what is answered")
        request = Request.of(**options)
        self.deadline = Deadline(request.timeout)
        # One seed for all: their prompts differ, and noise is keyed by seed and prompt.
        self._options: Options = {**options, "seed": request.sampling.seed}
        question = _OUTLINE.format(question=last["content"], points=points)
        self.outline_messages = [*messages[:-1], {**last, "content": question}]

    @property
    def outline_options(self) -> Options:
        """Return the options of the outline's request: what ends and scores a point's text does not hold for it."""
        return {
            **self._options,
            "max_tokens": OUTLINE_TOKENS * self._points,
            "grammar": outline_grammar(self._points),
            "min_tokens": 0,
            "stop": None,
            "stop_token_ids": (),
            "ignore_eos": False,
            "logprobs": None,
        }

    @property
    def point_options(self) -> Options:
        return self._options

    def titles(self, outline: str, *, cut: bool = False) -> list[str]:
        """Return the points of an outline, without their numbers. Raises BadRequest if it has none.

        cut: whether the outline ended for its length; then a last line that was not finished is no point.
        """
        whole = outline[: outline.rfind("\n") + 1] if cut else outline
        titles: list[str] = _LINE.findall(whole)[: self._points]
        if not titles:
            raise BadRequest(
                f"the target wrote an outline without a point ({outline[:TITLE_CHARS]!r}); ask with chat() instead",
                field="messages",
            )
        return [title.strip() for title in titles]

    def point_messages(self, outline: str, number: int, title: str) -> list[Message]:
        """Return the messages that ask for one point. They differ from one another in their last words alone."""
        return [
            *self.outline_messages,
            {"role": "assistant", "content": outline},
            {"role": "user", "content": _POINT.format(number=number, title=title)},
        ]


def _count(field: str, value: object, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        refuse(field, value, f"an integer from 1 to {most}")
    return value


def outline_grammar(points: int) -> str:
    """Return the grammar of a numbered list of one to `points` lines."""
    lines = ""
    for number in range(points, 0, -1):
        rest = f" ({lines})?" if lines else ""
        lines = f'"{number}. " TITLE "\\n"{rest}'
    return f"start: {lines}\nTITLE: /[^\\s][^\\n]{{1,{TITLE_CHARS - 1}}}/"


class SkeletonStream(ItemStream[SkeletonPoint]):
    """A skeleton that is being written, as `AsyncClient.stream_skeleton` returns it: iterate over it for its points.

    They come as they finish, in any order; `number` is a point's place. One that fails comes with its `error`, and the
    others continue. It has `next` and `aclose`, and leaving the iteration early, or the context, cancels all requests,
    as for CompletionStream.
    """

    def __init__(self, plan: SkeletonPlan, outline: CompletionStream, begin: Begin) -> None:
        super().__init__(self._points())
        self._plan = plan
        self._outline = outline
        self._begin = begin
        self._room = asyncio.Semaphore(plan.parallel)

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
        titles = self._plan.titles(outline.text, cut=outline.finish_reason == "length")
        tasks = [asyncio.create_task(self._point(outline.text, i, title)) for i, title in enumerate(titles, 1)]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _point(self, outline: str, number: int, title: str) -> SkeletonPoint:
        messages = self._plan.point_messages(outline, number, title)
        async with self._room:
            try:
                stream = await self._begin(messages, self._plan.point_options, self._plan.deadline.after_first_token())
                return SkeletonPoint(number, title, await stream.drain())
            except OutriderError as error:
                return SkeletonPoint(number, title, None, error)
