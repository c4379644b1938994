"""Gives chosen stretches the target's distributions, which the choice did without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from cloud_verifier.distill.data.spans import Stretch
from cloud_verifier.distill.data.texts import Text
from cloud_verifier.traffic.passage import Passage


class Filling:
    """Takes passages in any order, and makes a Text of every stretch that they cover."""

    def __init__(self, stretches: Iterable[Stretch], top: int) -> None:
        """top: the likeliest ids that are kept of a position; the others' mass goes to the tail."""
        self._top = top
        self._parts: dict[tuple[str, str, str], list[_Part]] = defaultdict(list)
        self._by_stretch: dict[tuple[str, str, str, int, int], _Part] = {}
        numbers: dict[str, int] = {}
        for stretch in stretches:
            number = numbers.setdefault(stretch.session_id, len(numbers))
            part = _Part(stretch, top, number)
            session = (stretch.session_id, stretch.tenant, stretch.traffic_class)
            self._parts[session].append(part)
            self._by_stretch[(*session, stretch.start, stretch.first)] = part

    def take(self, passage: Passage) -> None:
        """Copy what the passage has of any stretch."""
        for part in self._parts.get((passage.session_id, passage.tenant, passage.traffic_class), ()):
            part.take(passage)

    def covers(self, stretch: Stretch) -> bool:
        """Whether all that is learnt from the stretch has come."""
        return self._part(stretch).covered

    def text(self, stretch: Stretch) -> Text:
        """The stretch as a text."""
        return self._part(stretch).text()

    def _part(self, stretch: Stretch) -> _Part:
        return self._by_stretch[stretch.session_id, stretch.tenant, stretch.traffic_class, stretch.start, stretch.first]


class _Part:
    def __init__(self, stretch: Stretch, top: int, session: int) -> None:
        self._session = session
        count = len(stretch.tokens)
        self._stretch = stretch
        self._top_ids = np.full((count, top), -1, np.int32)
        self._top_log_probs = np.full((count, top), -np.inf, np.float32)
        self._tail = np.zeros(count, np.float32)
        self._known = np.zeros(count, bool)

    def take(self, passage: Passage) -> None:
        begin = max(self._stretch.start, passage.start)
        end = min(self._stretch.end, passage.start + len(passage.tokens))
        if begin >= end:
            return
        here = slice(begin - self._stretch.start, end - self._stretch.start)
        there = slice(begin - passage.start, end - passage.start)
        if not np.array_equal(self._stretch.tokens[here], passage.tokens[there]):
            return  # another verifier's account of these positions
        top = min(self._top_ids.shape[1], passage.top_ids.shape[1])
        self._top_ids[here, :top] = passage.top_ids[there, :top]
        self._top_log_probs[here, :top] = passage.top_log_probs[there, :top]
        beyond = np.exp(passage.top_log_probs[there, top:]).sum(1)
        self._tail[here] = np.clip(passage.tail[there] + beyond, 0.0, 1.0)
        self._known[here] = True

    @property
    def covered(self) -> bool:
        return bool(self._known[self._stretch.first :].all())

    def text(self) -> Text:
        one, ahead = self._stretch, len(self._stretch.prompt)
        return Text(
            one.traffic_class,
            one.tenant,
            np.concatenate([one.prompt, one.tokens]),
            np.pad(self._top_ids, ((ahead, 0), (0, 0)), constant_values=-1),
            np.pad(self._top_log_probs, ((ahead, 0), (0, 0)), constant_values=-np.inf),
            np.pad(self._tail, (ahead, 0)),
            ahead + one.first,
            self._session,
        )
