"""One frame of `outrider top`: the only place that imports rich."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise ImportError("outrider top needs rich: pip install 'outrider[coordinator]'") from error

from coordinator.cli.rates import Rates
from coordinator.cli.table_columns import ms, share
from outrider.core.text import clean

PLAIN_WIDTH = 132
"""Of a frame that goes to a file or a pipe."""
BAR = 10
_GAP = 2
"""Between columns."""
_SPARKS = " ▁▂▃▄▅▆▇█"
_AROUND = 9
"""Lines of a frame that are neither verifiers nor sessions."""
_STATES = {"serving": "green", "cordoned": "yellow", "draining": "magenta"}


class Screen:
    """A terminal, or whatever stdout is."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = PLAIN_WIDTH
        self._live: Live | None = None

    def print(self, status: Mapping[str, Any], rates: Rates, sessions: int) -> None:
        """A frame as it is, however long."""
        self._console.print(frame(status, rates, len(status["verifiers"]), sessions, self._console.width))

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """The whole terminal is ours until the body ends; then it is as it was."""
        with Live(console=self._console, screen=True, auto_refresh=False, transient=True) as self._live:
            yield
        self._live = None

    def show(
        self, status: Mapping[str, Any], rates: Rates, sessions: int | None, interval_s: float, trouble: str
    ) -> None:
        """A frame that fits the terminal. trouble: why it is an old one."""
        if self._live is None:
            return
        room = max(2, self._console.height - _AROUND)
        verifiers = min(len(status["verifiers"]), max(1, room // 2) if status["sessions"] else room)
        rest = max(1, room - verifiers)
        foot = Text(f"every {interval_s:g} s; q quits", "dim") if not trouble else Text(clean(trouble), "bold red")
        shown = frame(status, rates, verifiers, min(rest, sessions or rest), self._console.width)
        self._live.update(Group(shown, foot), refresh=True)


def frame(status: Mapping[str, Any], rates: Rates, verifiers: int, sessions: int, width: int) -> RenderableType:
    """So many rows of each; what is left out is said. width: of the terminal, which a table fits with fewer columns."""
    produced = {s["id"]: rates.tokens_per_s(s["id"]) for s in status["sessions"]}
    busiest = sorted(status["sessions"], key=lambda s: (-(produced[s["id"]] or 0.0), -s["committed"], s["id"]))
    return Group(
        _head(status),
        Text(),
        _verifiers(status["verifiers"][:verifiers], rates, width),
        _rest("verifiers", verifiers, status["total_verifiers"]),
        _sessions(busiest[:sessions], produced, width),
        _rest("sessions", sessions, status["total_sessions"]),
    )


def bar(used: float, whole: float) -> Text:
    """Green, then yellow from 70% and red from 90% on. Empty only where nothing is used."""
    part = _part(used, whole)
    full = max(round(part * BAR), int(part > 0))
    colour = "red" if part >= 0.9 else "yellow" if part >= 0.7 else "green"
    return Text.assemble(("█" * full, colour), ("░" * (BAR - full), "dim"))


def _part(used: float, whole: float) -> float:
    return min(1.0, used / whole) if whole else 0.0


def spark(values: Sequence[float]) -> str:
    """Of values from 0 on, by the greatest of them."""
    most = max(values, default=0.0)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round(top * value / most) if most > 0 else 0] for value in values)


def _head(status: Mapping[str, Any]) -> Text:
    verifiers = status["verifiers"]
    states = [v["state"] for v in verifiers]
    counted = ", ".join(f"{states.count(state)} {state}" for state in _STATES if state in states) or "none"
    seats = f"{sum(v['sessions'] for v in verifiers)} of {sum(v['capacity'] for v in verifiers)}"
    evaluated, accepted = (sum(v[name] for v in verifiers) for name in ("evaluated", "accepted"))
    return Text.assemble(
        ("outrider top", "bold"),
        f"  {clean(status['coordinator'])}  {time.strftime('%H:%M:%S')}  up {_span(status['uptime_s'])}",
        f"  store {clean(status['store'])}\n",
        ("verifiers ", "dim"),
        counted,
        ("   sessions ", "dim"),
        seats,
        ("   tokens/s ", "dim"),
        f"{sum(v['tokens_per_s'] for v in verifiers):.0f}",
        ("   accepted ", "dim"),
        share(accepted / evaluated if evaluated else None),
        no_wrap=True,
        overflow="ellipsis",
    )


_VERIFIERS = (
    ("VERIFIER", 0),
    ("STATE", 0),
    ("LOAD", 3),
    ("SESSIONS>", 0),
    ("TOKENS/S>", 0),
    ("LATELY", 4),
    ("STEP>", 2),
    ("PRICE>", 0),
    ("ACCEPTED>", 0),
    ("RTT>", 0),
    ("KV", 1),
)
_SESSIONS = (
    ("SESSION", 0),
    ("TENANT", 2),
    ("VERIFIER", 1),
    ("TOKENS/S>", 0),
    ("COMMITTED>", 4),
    ("TOKENS/STEP>", 3),
    ("ACCEPTED>", 0),
    ("RTT>", 0),
    ("CLASS", 5),
)
"""Names, of numbers where they end with `>`, each with how soon a narrow terminal goes without it; 0: never."""


def _verifiers(found: Sequence[Mapping[str, Any]], rates: Rates, width: int) -> Table:
    rows = [
        (
            Text(clean(v["id"])),
            Text(v["state"], _STATES[v["state"]]),
            bar(v["sessions"], v["capacity"]),
            Text(f"{v['sessions']}/{v['capacity']}"),
            Text(f"{v['tokens_per_s']:.0f}"),
            Text(spark(rates.history.get(v["id"], ())), "cyan"),
            Text(ms(v["step_ms"])),
            Text(f"{v['min_acceptance']:.2f}"),
            Text(share(rates.acceptance(v))),
            Text(ms(v["rtt_ms"])),
            Text.assemble(bar(v["kv_used"], v["kv_capacity"]), f" {_part(v['kv_used'], v['kv_capacity']):.0%}"),
        )
        for v in found
    ]
    return _table(_VERIFIERS, rows, width)


def _sessions(found: Sequence[Mapping[str, Any]], produced: Mapping[str, float | None], width: int) -> Table:
    rows = [
        (
            Text(clean(s["id"])),
            Text(clean(s["tenant"])),
            Text(clean(s["verifier"])),
            Text("-" if (tokens_per_s := produced[s["id"]]) is None else f"{tokens_per_s:.0f}"),
            Text(str(s["committed"])),
            Text(f"{s['tokens_per_step'] or 0:.2f}"),
            Text(share(s["acceptance"])),
            Text(ms(s["rtt_ms"])),
            Text(clean(s["traffic_class"] or "-")),
        )
        for s in found
    ]
    return _table(_SESSIONS, rows, width)


def _table(names: Sequence[tuple[str, int]], rows: Sequence[Sequence[Text]], width: int) -> Table:
    """Cells are Text, which has no markup. A column that says nothing is left out."""
    sizes = [max(len(name.rstrip(">")), *(row[i].cell_len for row in rows), 0) for i, (name, _) in enumerate(names)]
    said = [i for i in _fitting(sizes, [spare for _, spare in names], width) if not rows or any(row[i] for row in rows)]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for i in said:
        right = names[i][0].endswith(">")
        header = names[i][0].rstrip(">")
        table.add_column(header, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(row[i] for i in said))
    return table


def _fitting(sizes: Sequence[int], spare: Sequence[int], width: int) -> list[int]:
    """The columns that stay."""
    kept = list(range(len(sizes)))
    while sum(sizes[i] + _GAP for i in kept) - _GAP > width and any(spare[i] for i in kept):
        kept.remove(max(kept, key=lambda i: spare[i]))
    return kept


def _rest(what: str, most: int, total: int) -> Text:
    return Text(f"and {total - most} more {what}" if total > most else "", "dim")


def _span(up_s: float) -> str:
    minutes, hours = int(up_s) // 60, int(up_s) // 3600
    return f"{int(up_s)} s" if minutes < 2 else f"{minutes} min" if hours < 2 else f"{hours} h {minutes % 60} min"
