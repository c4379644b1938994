"""Select the pieces of a dataset: a mix of fresh and old traffic, fair to classes and tenants. Pure functions."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.distill.data.plan import DatasetPlan
from cloud_verifier.traffic.passage import Passage

Age = Literal["fresh", "old"]
_Key = TypeVar("_Key", bound=Hashable)
OTHERS = "(others)"
"""Name of all the classes together that are too many to be distinguished."""
_CONSIDERED = 8
"""Multiple of the budget that is compared for duplicates: each compared piece takes memory, and logs are large."""
_SHINGLE = 8
"""Tokens of a shingle: so many that two texts rarely share one by chance."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


def select(
    pieces: Sequence[Passage], plan: DatasetPlan, tokens: int, fresh_since_unix: float
) -> tuple[list[Passage], Counter[str]]:
    """Select pieces with at most `tokens` labels, in an order drawn by the plan's seed.

    fresh_since_unix: old pieces have the replay share of what is selected; infinity if all shall have the same right.
    Also returns the labels left out as `duplicates`, `over_cap` and `over_budget`.
    """
    left_out: Counter[str] = Counter()
    drawn = sorted(pieces, key=lambda one: _lot(one, plan.seed))
    by_class: dict[str, list[Passage]] = defaultdict(list)
    for piece in _capped(drawn, plan, tokens, fresh_since_unix, left_out):
        by_class[piece.traffic_class].append(piece)
    offered: dict[tuple[str, Age], list[Passage]] = defaultdict(list)
    for name, some in by_class.items():
        room = dict.fromkeys(get_args(Age), _CONSIDERED * tokens)
        considered = (one for one in some if _spend(room, age(one, fresh_since_unix), one, left_out, "over_budget"))
        distinct = _distinct(considered, plan, left_out)
        for piece in _capped(distinct, plan, tokens, fresh_since_unix, left_out):
            offered[name, age(piece, fresh_since_unix)].append(piece)
    budgets = _budgets(offered, plan, tokens)
    chosen = [
        one for key in sorted(offered) for one in offered[key] if _spend(budgets, key, one, left_out, "over_budget")
    ]
    return chosen, left_out


def age(piece: Passage, fresh_since_unix: float) -> Age:
    return "fresh" if piece.time_unix >= fresh_since_unix else "old"


def water_filled(available: Mapping[_Key, int], weights: Mapping[_Key, float], total: int) -> dict[_Key, int]:
    """Divide `total` by weight, none above what is available; what one cannot take is divided among the others."""
    given = dict.fromkeys(available, 0)
    wanting = {name for name, amount in available.items() if amount > 0}
    left = total
    while wanting and left >= len(wanting):
        weighed = sum(weights.get(name, 1.0) for name in wanting)
        if weighed == 0:
            weights, weighed = {}, len(wanting)
        unit = left / weighed
        for name in sorted(wanting, key=str):
            given[name] += min(int(unit * weights.get(name, 1.0)), available[name] - given[name])
        full = {name for name in wanting if given[name] == available[name]}
        left = total - sum(given.values())
        if not full:
            break
        wanting -= full
    return given


def tenant_cap(amounts: Iterable[int], share: float, floor: int) -> int:
    """Return how many tokens one tenant may give, so that none gives more than `share` of all that is given.

    amounts: tokens that each tenant offers. A share below an equal part is raised to that. The result is at least
    `floor`, so that a small tenant does not limit a large one to as little.
    """
    ascending = sorted(amounts)
    share = max(share, 1 / len(ascending))
    for capped in range(len(ascending)):
        below = ascending[: len(ascending) - capped]
        cap = round(share * sum(below) / (1 - share * capped)) if share * capped < 1 else 0
        if cap >= below[-1]:
            return max(cap, floor)
    return floor


def shingles(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Return the distinct hashes of all runs of `_SHINGLE` tokens, or the hash of a text that is shorter."""
    width = min(_SHINGLE, len(tokens))
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), width)
    hashes = np.zeros(len(windows), np.uint64)
    for column in range(width):
        hashes = (hashes ^ windows[:, column]) * _ODD
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


def _lot(piece: Passage, seed: int) -> bytes:
    """Return a key that orders pieces at random, and always alike for a seed."""
    name = f"{seed}/{piece.session_id}/{piece.start}"
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _distinct(pieces: Iterable[Passage], plan: DatasetPlan, left_out: Counter[str]) -> list[Passage]:
    """Leave out a piece that is nearly equal to as many others as the plan's `copies`."""
    seen: Counter[int] = Counter()
    kept = []
    for piece in pieces:
        hashes = shingles(piece.tokens).tolist()
        repeated = sum(seen[one] >= plan.copies for one in hashes)
        if repeated >= plan.repeated_share * len(hashes):
            left_out["duplicates"] += len(piece)
            continue
        seen.update(hashes)
        kept.append(piece)
    return kept


def _capped(
    pieces: Sequence[Passage], plan: DatasetPlan, tokens: int, fresh_since_unix: float, left_out: Counter[str]
) -> list[Passage]:
    """Cap each tenant, which gives of all its classes and ages alike; one that is alone is not capped."""
    amounts: dict[str, Counter[tuple[str, Age]]] = defaultdict(Counter)
    for piece in pieces:
        amounts[piece.tenant][piece.traffic_class, age(piece, fresh_since_unix)] += len(piece)
    if len(amounts) < 2:
        return list(pieces)
    # If there is more than the budget, a tenant has its share of the budget: others can fill the rest.
    share = max(plan.tenant_share, 1 / len(amounts))
    cap = min(tenant_cap((one.total() for one in amounts.values()), share, 0), int(share * tokens))
    budgets = {
        (tenant, *kind): budget
        for tenant, of_tenant in amounts.items()
        for kind, budget in water_filled(of_tenant, {}, max(cap, plan.tenant_floor(tokens))).items()
    }
    keys = ((one.tenant, one.traffic_class, age(one, fresh_since_unix)) for one in pieces)
    return [one for one, key in zip(pieces, keys, strict=True) if _spend(budgets, key, one, left_out, "over_cap")]


def _spend(budgets: dict[_Key, int], key: _Key, piece: Passage, left_out: Counter[str], reason: str) -> bool:
    """Take a piece's labels from a budget; return False, and count them as left out, if they do not fit."""
    if budgets[key] < len(piece):
        left_out[reason] += len(piece)
        return False
    budgets[key] -= len(piece)
    return True


def class_names(amounts: Mapping[str, Mapping[str, int]], most: int, named: Collection[str]) -> dict[str, str]:
    """Map each class to its own name, or to `OTHERS` if it is neither one of the `most` largest nor `named`.

    amounts: tokens by tenant and class. A tenant's tokens are divided by its number of classes, so that it cannot
    displace other tenants' classes by inventing its own.
    """
    sizes: dict[str, float] = defaultdict(float)
    for of_tenant in amounts.values():
        for name, tokens in of_tenant.items():
            sizes[name] += tokens / len(of_tenant)
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:most]
    return {name: name if name in largest or name in named else OTHERS for name in sizes}


def _budgets(
    offered: Mapping[tuple[str, Age], Sequence[Passage]], plan: DatasetPlan, tokens: int
) -> dict[tuple[str, Age], int]:
    """Divide `tokens` among classes and ages; all of it is old traffic where nothing is fresh."""
    amounts = {key: sum(len(piece) for piece in some) for key, some in offered.items()}
    old = {name: amount for (name, age), amount in amounts.items() if age == "old"}
    fresh = {name: amount for (name, age), amount in amounts.items() if age == "fresh"}
    wanted = min(sum(fresh.values()), tokens * (1 - plan.replay_share))
    replayed = tokens if not fresh else int(wanted * plan.replay_share / (1 - plan.replay_share))
    replay = water_filled(old, {}, replayed)
    new = water_filled(fresh, {}, tokens - sum(replay.values()))
    return {(name, "old"): n for name, n in replay.items()} | {(name, "fresh"): n for name, n in new.items()}
