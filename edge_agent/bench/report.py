"""Make figures and tables of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from edge_agent.bench.measure import Configuration
from edge_agent.bench.users import Run, Text, degenerates, differing
from outrider.core.text import counted, table
from outrider.wire.channels import is_loopback

Row = dict[str, Any]


def rows(measured: Sequence[Configuration]) -> list[Row]:
    """Return two rows for each configuration, without speculation and with it.

    first_token_ms, token_ms: medians of the texts; the latter from the first token on. tokens_per_s_user: of a user,
    from its requests on. tokens_per_s: of all users, while all of them generate. speed_up: of a text's time from the
    first token on, in the median. from_devices, from_verifier: share of the tokens that were draft tokens of the one
    and of the other alone. accepted: share of the devices' draft tokens that the target evaluated. differing: texts
    that are not those without drafts. Bytes are by token, with the prompt's, without headers. None is what nothing
    was measured of.
    """
    found = []
    for one in measured:
        plain, fast = texts(one.undrafted), texts(one.drafted)
        compared = {"speed_up": speed_up(plain, fast), "differing": differing(fast, plain)}
        found += [_row(one, one.undrafted), _row(one, one.drafted) | {"drafts": True} | compared]
    return found


def by_category(measured: Sequence[Configuration], categories: Sequence[str]) -> list[Row]:
    """Return a row for each configuration and category. categories: of each prompt, in the prompts' order."""
    found = []
    for configuration in measured:
        undrafted, drafted = texts(configuration.undrafted), texts(configuration.drafted)
        for category in dict.fromkeys(categories):
            plain, fast = ([one for one in side if categories[one.prompt] == category] for side in (undrafted, drafted))
            if fast:
                found.append(
                    {
                        "rtt_ms": configuration.rtt_ms,
                        "users": configuration.users,
                        "category": category,
                        "texts": len(fast),
                        "acceptance_length": acceptance_length(fast),
                        "speed_up": speed_up(plain, fast),
                        "differing": differing(fast, plain),
                    }
                )
    return found


def _row(configuration: Configuration, runs: Sequence[Run]) -> Row:
    found = texts(runs)
    tokens, accepted = sum(len(one.tokens) for one in found), sum(one.accepted for one in found)
    own = sum(max(0, len(one.tokens) - one.steps - one.accepted) for one in found)
    together = [one.together for one in runs]
    return {
        "rtt_ms": configuration.rtt_ms,
        "users": configuration.users,
        "drafts": False,
        "texts": len(found),
        "first_token_ms": _median([1e3 * one.first_token_s for one in found], 1),
        "token_ms": _median([1e3 / one.rate for one in found if one.rate], 2),
        "tokens_per_s_user": _ratio(tokens, sum(one.seconds for one in found), 1),
        "tokens_per_s": _ratio(sum(count for count, _ in together), sum(seconds for _, seconds in together), 1),
        "speed_up": None,
        "acceptance_length": acceptance_length(found),
        "from_devices": _ratio(accepted, tokens, 3),
        "from_verifier": _ratio(own, tokens, 3),
        "accepted": _ratio(accepted, sum(one.evaluated for one in found), 3),
        "bytes_up": _ratio(sum(one.bytes_up for one in found), tokens, 1),
        "bytes_down": _ratio(sum(one.bytes_down for one in found), tokens, 1),
        "differing": None,
        "degenerate": sum(degenerates(one.tokens) for one in found),
        "devices_busy": _median([one.busy for one in runs], 2),
    }


def texts(runs: Sequence[Run]) -> list[Text]:
    return [text for one in runs for text in one.texts]


def acceptance_length(found: Sequence[Text]) -> float | None:
    """Return the mean tokens of a step of the target."""
    return _ratio(sum(len(one.tokens) for one in found), sum(one.steps for one in found), 3)


def speed_up(undrafted: Sequence[Text], drafted: Sequence[Text]) -> float | None:
    """Return the rate of a text over that of the same text without drafts, in the median."""
    rates = {(one.prompt, one.turn): one.rate for one in undrafted}
    pairs = [(one.rate, rates.get((one.prompt, one.turn), 0.0)) for one in drafted]
    return _median([fast / plain for fast, plain in pairs if fast and plain], 3)


def _median(values: Sequence[float], digits: int) -> float | None:
    return round(statistics.median(values), digits) if values else None


def _ratio(part: float, whole: float, digits: int) -> float | None:
    return round(part / whole, digits) if whole else None


# --- tables

COLUMNS = (
    *("RTT", "USERS", "DRAFTS", "FIRST TOKEN", "PER TOKEN", "TOKENS/S A USER", "IN ALL", "SPEED-UP"),
    *("ACCEPTANCE LENGTH", "BYTES A TOKEN", "IDENTICAL"),
)


def _cells(row: Row) -> tuple[str, ...]:
    count = row["texts"] - (row["differing"] or 0)
    identical = "yes" if row["differing"] == 0 else f"{count} of {row['texts']}"
    return (
        f"{row['rtt_ms']:g} ms",
        str(row["users"]),
        "yes" if row["drafts"] else "no",
        _shown(row["first_token_ms"], ".0f", " ms"),
        _shown(row["token_ms"], ".1f", " ms"),
        _shown(row["tokens_per_s_user"], ".1f"),
        _shown(row["tokens_per_s"], ".1f"),
        _shown(row["speed_up"], ".2f", "x"),
        _shown(row["acceptance_length"], ".2f"),
        f"{_shown(row['bytes_up'], '.0f')} up, {_shown(row['bytes_down'], '.0f')} down",
        "-" if row["differing"] is None else identical,
    )


def category_table(found: Sequence[Row]) -> str:
    """Return the table of `by_category`: a column for each configuration, with acceptance length and speed-up."""
    names = list(dict.fromkeys(Configuration(row["rtt_ms"], row["users"]).name for row in found))
    by_name: dict[str, dict[str, Row]] = {}
    for row in found:
        by_name.setdefault(row["category"], {})[Configuration(row["rtt_ms"], row["users"]).name] = row
    cells = [
        (
            category,
            str(max(row["texts"] for row in columns.values())),
            *(_length(columns.get(name)) for name in names),
        )
        for category, columns in by_name.items()
    ]
    return table(("ACCEPTANCE LENGTH", "TEXTS", *names), cells)


def _length(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{_shown(row['acceptance_length'], '.2f')} ({_shown(row['speed_up'], '.2f', 'x')})"


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def described(document: Mapping[str, Any]) -> str:
    """Return the result as text for people: what was measured, two tables, and what they do not show."""
    target, found = document["target"], document["rows"]
    prompts = ", ".join(f"{count} {category}" for category, count in document["prompts"].items())
    heading = [
        f"{target['name']} ({target['dtype']}, {target['backend']}, {target['hardware']}) at {document['cluster']}",
        f"{counted(sum(document['prompts'].values()), 'prompt')} ({prompts}), each with drafts and without in turn,"
        f" at most {document['max_tokens']} tokens, temperature {document['temperature']:g}",
    ]
    if document["too_long"]:
        heading.append(f"{counted(document['too_long'], 'prompt')} left out, since the target cannot hold them.")
    if not document["whole"]:
        heading.append("It was interrupted: this is what was measured until then.")
    parts = [
        "\n".join(heading),
        table(COLUMNS, [_cells(row) for row in found]),
        category_table(document["categories"]),
        "\n".join(notes(document)),
    ]
    return "\n\n".join(parts)


def notes(document: Mapping[str, Any]) -> list[str]:
    """Return what the tables do not show, in sentences."""
    found = document["rows"]
    drafted = [row for row in found if row["drafts"]]
    count, other, loops = (sum(row[name] for row in drafted) for name in ("texts", "differing", "degenerate"))
    device, verifier = (statistics.fmean(row[name] for row in drafted) for name in ("from_devices", "from_verifier"))
    lines = [
        f"With drafts, {device:.0%} of the tokens were draft tokens of the devices"
        f" ({', '.join(document['device_drafts']) or 'which had no draft'}) and {verifier:.0%} of the verifier alone;"
        " without, neither drafts."
    ]
    lines.append(
        "FIRST TOKEN is that of prompts that the verifier has read before; a new one's came after"
        f" {document['new_prompt_first_token_ms']:.0f} ms, and one of {document['long_prompt']['tokens']:,} tokens was"
        f" read at {document['long_prompt']['tokens_per_s']:,.0f} tokens/s (one user, no delay added)."
    )
    if other:
        lines.append(
            f"{other} of {counted(count, 'text')} differ with drafts. In 16 bits a near tie may fall the other way if"
            " more tokens share a step; in float32 it is a defect; please report it."
        )
    if loops:
        lines.append(f"{loops} of {counted(count, 'text')} end in a loop, which any draft predicts well.")
    if is_loopback(document["cluster"]):
        busy = max(row["devices_busy"] for row in found)
        lines.append(
            f"Devices and cluster shared this machine's {counted(document['cpus'], 'CPU')}, of which the devices took"
            f" up to {busy:.0%}: on machines of their own, drafts cost the verifier no time."
        )
    return lines
