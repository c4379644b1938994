"""Decide windows session by session and replay by replay, as the definition that the controller's arrays must match."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streaming_model import LinkTiming, Speed, replay

from coordinator.records import Window
from coordinator.window import controller, report_adapter
from coordinator.window.controller import SessionView, VerifierView
from coordinator.window.window_search import FILLED, FINER, MIN_ACCEPTANCES, PASSES
from outrider.core.acceptance.history import HIT


@dataclass(frozen=True)
class Option:
    window: Window
    tokens: float
    nodes: float = 0.0
    given: bool = False


def replayed(
    history: bytes, rtt: float, draft: float, k: int, depth: int, wait: float = 0.0, gain: float = 0.0
) -> Speed:
    """Replay a history with times in steps."""
    return replay(history, LinkTiming(rtt, draft, lambda nodes: 1.0), Window(k, depth, 1e3 * wait), gain)


def options(session: SessionView, step_s: float, alone: bool) -> list[Option]:
    seen, bounds = session.telemetry, session.bounds.window
    if session.fixed is not None and not session.bounds.pinned:
        return [Option(controller.STREAMING, *session.fixed, given=True)]
    rtt, draft = rounded(seen.rtt_ms / (1e3 * step_s)), rounded(seen.draft_ms / (1e3 * step_s))
    answer = rtt + 2.0 * draft
    near = min(controller.SLACK * answer, controller.NEAR) if answer <= controller.NEAR else 0.0

    def of(window: Window, wait: float, given: bool = False) -> Option:
        speed = replayed(seen.acceptance_history, rtt, draft, window.k, window.depth, wait, session.server_gain)
        nodes = speed.nodes / speed.seconds * (window.nodes_per_level or 1.0)
        return Option(window, speed.tokens_per_s, nodes, given)

    plain = 1.0 + session.server_gain
    if session.bounds.pinned:
        wait = near if bounds.draft_wait_ms is None else bounds.draft_wait_ms / (1e3 * step_s)
        window = Window(bounds.k, bounds.depth, 1e3 * step_s * wait, bounds.nodes_per_level)
        idle = Option(window, plain, window.k * (window.nodes_per_level or 1.0), given=True)
        return [of(window, wait, given=True) if session.drafts else idle]
    found = [Option(controller.STREAMING, plain)]
    if session.drafts:
        for k in controller.K:
            depth = min(k + math.ceil(rtt) + controller.SPARE, bounds.depth)
            for wait in (0.0, near) if alone else (0.0,):
                granted = wait if alone and not session.server_gain else near
                if k <= min(bounds.k, bounds.depth):
                    found.append(of(Window(k, depth, 1e3 * step_s * granted, seen.nodes_per_level), wait))
    return found


def rounded(ratio: float) -> float:
    return math.exp2(round(8.0 * math.log2(ratio)) / 8.0) if 1e-4 < ratio < math.inf else ratio * (ratio > 1.0)


class Search:
    """Tries everything one by one. Choices are lists of numbers of options, one for each session."""

    def __init__(self, tables: Sequence[Sequence[Option]], step_s: Callable[[float], float], least: float) -> None:
        self._tables, self._step_s, self._least = tables, step_s, least

    def chosen(self, choice: Sequence[int]) -> list[Option]:
        return [table[number] for table, number in zip(self._tables, choice, strict=True)]

    def nodes(self, choice: Sequence[int]) -> float:
        return sum(option.nodes for option in self.chosen(choice))

    def length_s(self, choice: Sequence[int]) -> float:
        return float(self._step_s(self.nodes(choice)))

    def goodput(self, choice: Sequence[int]) -> float:
        return sum(option.tokens for option in self.chosen(choice)) / self.length_s(choice)

    def fair(self, choice: Sequence[int]) -> bool:
        tokens = min((option.tokens for option in self.chosen(choice) if not option.given), default=math.inf)
        return tokens >= self._least * self.length_s(choice)

    def best(self) -> tuple[float, list[int]]:
        """Return min_acceptance and the choice of the greatest goodput, before single changes.

        Of equal choices the first is taken. Only streaming, with which it begins, gives way to an equal one, as in the
        controller's search.
        """
        best, best_at, found = [0] * len(self._tables), float(MIN_ACCEPTANCES[-1]), False
        most, total = sum(max(option.nodes for option in table) for table in self._tables), 0.5
        while True:
            total = min(total, most)
            asked = self._least * float(self._step_s(total))
            tables = [
                [i for i, option in enumerate(table) if option.given or option.tokens >= asked]
                for table in self._tables
            ]
            if not all(tables):
                break
            at, choice = self._within(total, tables)
            if self.nodes(choice) <= total and (self.goodput(choice), not found) > (self.goodput(best), False):
                best_at, best, found = at, choice, True
            if total == most:
                break
            total *= FINER
        return best_at, best

    def _within(self, total: float, allowed: Sequence[Sequence[int]]) -> tuple[float, list[int]]:
        at, choice = 0.0, [0] * len(allowed)
        for at in MIN_ACCEPTANCES.tolist():  # the first that takes no more nodes, or else the last
            choice = [
                max(numbers, key=lambda i, table=table, m=at: table[i].tokens - m * table[i].nodes)  # type: ignore[misc]
                for table, numbers in zip(self._tables, allowed, strict=True)
            ]
            if self.nodes(choice) <= total:
                break
        for _ in range(FILLED):
            spare = total - self.nodes(choice)
            more = [
                (table[i].tokens - now.tokens, -row, -i)
                for row, (table, now, numbers) in enumerate(
                    zip(self._tables, self.chosen(choice), allowed, strict=True)
                )
                for i in numbers
                if table[i].nodes <= now.nodes + spare
            ]
            gain, row, number = max(more, default=(0.0, 0, 0))
            if spare <= 0.0 or gain <= 0.0:
                break
            choice[-row] = -number
        return at, choice

    def polished(self, choice: list[int], stick: float = 0.0) -> list[int]:
        for _ in range(PASSES):
            before = choice
            for row, table in enumerate(self._tables):
                if table[0].given:
                    continue
                tried = [[*choice[:row], number, *choice[row + 1 :]] for number in range(len(table))]
                best = max((each for each in tried if self.fair(each)), key=self.goodput, default=choice)
                sticks = stick * table[choice[row]].tokens / self.length_s(choice)
                if self.goodput(best) > self.goodput(choice) * (1.0 + 1e-9) + sticks:
                    choice = best
            if choice == before:
                break
        return choice


def decide(view: VerifierView, tolerance: float) -> tuple[list[Option], float]:
    """Return an option for each session, and the length of the step."""
    step_s = view.step_now_s or float(view.step_s(0))
    for _ in range(controller.ROUNDS):
        tables = [options(session, step_s, len(view.sessions) == 1) for session in view.sessions]
        given = sum(table[0].nodes for table in tables if table[0].given)
        search = Search(tables, view.step_s, (1.0 - tolerance) / float(view.step_s(given)))  # type: ignore[arg-type]
        at, choice = search.best()
        choice = search.polished(choice)
        before, step_s = step_s, search.length_s(choice)
        if abs(step_s - before) < controller.SETTLED * before:
            break
    kept = [_kept(*each, at) for each in zip(view.sessions, tables, choice, strict=True)]
    if search.fair(kept):
        choice = search.polished(kept, controller.STICK)
    return search.chosen(choice), search.length_s(choice)


def _kept(session: SessionView, table: Sequence[Option], best: int, min_acceptance: float) -> int:
    history, now = session.telemetry.acceptance_history, session.current
    failed = bool(history) and history.count(HIT) < controller.FAILED * len(history)
    if now is None or (table[best].window.k == 0 and failed):
        return best
    enough = table[best].tokens * (1.0 - controller.STICK) - min_acceptance * table[best].nodes
    for number, option in enumerate(table):
        same = option.window.k == now.k and bool(option.window.draft_wait_ms) == bool(now.draft_wait_ms)
        if same and option.tokens - min_acceptance * option.nodes >= enough:
            return number
    return best


def latest(history: bytes) -> bytes:
    """Cut one history where its end differs most from its beginning, until it does not."""
    kept = history[-report_adapter.RECENT :]
    while True:
        differences = []
        for last in report_adapter.LAST:
            earlier, later = kept[:-last], kept[-last:]
            before, after = earlier.count(HIT), later.count(HIT)
            mean = (before + after) / max(1, len(kept))
            deviation = math.sqrt(mean * (1.0 - mean) * (1.0 / max(1, len(earlier)) + 1.0 / last))
            if len(earlier) >= report_adapter.LAST[0] and deviation:
                differences.append((abs(before / len(earlier) - after / len(later)) / deviation, last))
        difference, last = max(differences, default=(0.0, 0))
        if difference <= report_adapter.CHANGED:
            return kept
        kept = kept[-last:]
