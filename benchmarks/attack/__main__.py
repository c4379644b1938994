"""Attack a live cluster in every way that an earlier version did not withstand, while a neighbour's session goes on.

One line of JSON for each attack says what was measured and whether the product held; the last line counts them.
`--code` starts the cluster from another checkout, such as one of an earlier commit; the attackers are this one's.
The neighbour's session is one request again and again, whose tokens must be those of an undisturbed session, and whose
99th percentile of the time between deliveries must be at most twice that of the quiet times before the attacks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.attack import canary, floods, hostile_files, places, sizes, trust
from benchmarks.attack.finding import Attack, Finding
from benchmarks.attack.lab import Lab
from benchmarks.attack.product import Product
from benchmarks.support import harness
from benchmarks.support.harness import Criterion, Pair, Size
from coordinator.cluster import stand_apart

ATTACKS: dict[str, Attack] = {
    "watch_coordinator": floods.watch_coordinator,
    "reflect_coordinator": floods.reflect_coordinator,
    "watch_verifier": floods.watch_verifier,
    "reflect_verifier": floods.reflect_verifier,
    "unfinished_at_coordinator": floods.unfinished_at_coordinator,
    "unfinished_at_verifier": floods.unfinished_at_verifier,
    "unfinished_health_checks": floods.unfinished_health_checks,
    "health_checks": floods.health_checks,
    "unfinished_from_many_connections": floods.unfinished_from_many_connections,
    "two_tenants": floods.two_tenants,
    "refusals": floods.refusals,
    "unread_downloads": floods.unread_downloads,
    "unread_downloads_with_ticket": floods.unread_downloads_with_ticket,
    "all_places": places.all_places,
    "flood_of_opens": places.flood_of_opens,
    "closed_tickets": places.closed_tickets,
    "hostile_drafts": hostile_files.hostile_drafts,
    "bad_draft_of_up": hostile_files.bad_draft_of_up,
    "redis_lost": trust.redis_lost,
    "killed_session": places.killed_session,
    "revoked_tenant": places.revoked_tenant,
    "frame_sizes": sizes.frame_sizes,
    "worse_made_stable": canary.worse_made_stable,
    "better_rolled_back": canary.better_rolled_back,
    "template_bombs": hostile_files.template_bombs,
    "silent_connections": floods.silent_connections,
    "unknown_keys": floods.unknown_keys,
    "key_in_redis": trust.key_in_redis,
    "fenced_by_id": trust.fenced_by_id,
    "on_loopback": trust.on_loopback,
}
SMOKE = ("watch_coordinator", "unfinished_at_verifier", "unknown_keys")
QUICK = (*SMOKE, "killed_session")
TIMES = 2.0
"""By how much the neighbour's p99 gap may grow."""
ATTACK_S = 1_200.0
"""Time after which an attack is given up, which then has not held."""


async def carry_out(name: str, lab: Lab) -> dict[str, Any]:
    """Carry out one attack; return its line."""
    attacks = len(lab.attacks)
    began = time.monotonic()
    try:
        async with asyncio.timeout(ATTACK_S):
            finding = await ATTACKS[name](lab)
    except Exception as error:  # whatever it is, nothing was shown
        finding = Finding(False, {"error": f"{type(error).__name__}: {error}"[:300]}, "the attack was carried out")
    windows = lab.attacks[attacks:]
    faults = [fault for window in windows for fault in lab.neighbour.faults(window)]
    during, quiet = lab.neighbour.p99_ms(*windows) if windows else None, lab.quiet_p99_ms()
    ratio = during / quiet if during and quiet else None
    line = {
        "attack": name,
        "held": finding.held,
        "measured": finding.measured,
        "bound": finding.bound,
        "neighbour_equal": not faults,
        "neighbour_p99_ratio": harness.rounded(ratio, 2),
        "neighbour_p99_ms": [harness.rounded(during), harness.rounded(quiet)],
        "seconds": round(time.monotonic() - began, 1),
    }
    return line | ({"neighbour_faults": faults[:3]} if faults else {})


async def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    if options.list:
        for name, attack in ATTACKS.items():
            print(f"{name:<33} {attack.__doc__}")
        return
    pair = Pair.in_folder(options.models)
    names = options.only or options.size.pick(smoke=SMOKE, quick=QUICK, full=tuple(ATTACKS))
    cores = harness.cores()
    lines = []
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        stand_apart(Path(scratch))
        harness.pin(cores[1])
        prompt = next(iter(pair.encode(harness.prompts("heldout", 1)).values()))
        tokens = options.size.pick(smoke=200, quick=800, full=1_600)
        async with Lab(Product(options.code), pair, options.size, Path(scratch), cores, prompt, tokens) as lab:
            for name in names:
                lines.append(await carry_out(name, lab))
                print(json.dumps(lines[-1]), flush=True)
                if not await lab.recover():
                    print(f"after {name} nobody was served any more: the cluster was started anew", flush=True)
    finish(lines, options.size)


def finish(lines: Sequence[dict[str, Any]], size: Size) -> None:
    """Print the last line; exit with status 1 if something did not hold."""
    differing = sum(not line["neighbour_equal"] for line in lines)
    ratios = [line["neighbour_p99_ratio"] for line in lines if line["neighbour_p99_ratio"] is not None]
    held = sum(line["held"] for line in lines)
    harness.finish(
        {
            "attacks": len(lines),
            "held": held,
            "neighbour_differing": differing,
            "neighbour_p99_ratio": max(ratios, default=None),
            "by_attack": {
                line["attack"]: {key: line[key] for key in ("measured", "neighbour_p99_ratio")} for line in lines
            },
        },
        [
            Criterion.bound(
                "attacks against which the product held", held, at_least=len(lines), enforced_from=Size.QUICK
            ),
            Criterion.none("attacks in which the neighbour's session was not as an undisturbed one", differing),
            Criterion.bound("the neighbour's p99 gap over the quiet one's", max(ratios, default=None), at_most=TIMES),
        ],
        size,
    )


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.arguments("attack", __doc__)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), metavar="NAME", help="carry out these alone")
    parser.add_argument("--list", action="store_true", help="print the attacks and what each does")
    parser.add_argument(
        "--code", type=Path, default=harness.ROOT, help="checkout from which the cluster's processes are started"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(main())
