"""Select the spans of a dataset: a replay mix of fresh and old traffic, fair to classes and tenants. Pure functions."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.distill.data.plan import DatasetPlan
from cloud_verifier.distill.data.spans import TextSpan

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
    pieces: Sequence[TextSpan], plan: DatasetPlan, tokens: int, *, by_class: bool
) -> tuple[list[TextSpan], Counter[str]]:
    """Select pieces with at most `tokens` labels, in an order drawn by the plan's seed.

    by_class: whether each class has its share whatever the age of its texts, so that the replay share applies within a
    class only; otherwise an old class takes part in the replay share alone. Also returns the labels left out as
    `duplicates`, `over_cap` and `over_budget`.
    """
    left_out: Counter[str] = Counter()
    of_class: dict[str, list[TextSpan]] = defaultdict(list)
    for piece in _capped_over_all(sorted(pieces, key=lambda one: _lot(one, plan.seed)), plan, tokens, left_out):
        of_class[piece.traffic_class].append(piece)
    offered: dict[tuple[str, Age], list[TextSpan]] = defaultdict(list)
    for name, some in of_class.items():
        distinct = _distinct(_considered(some, plan, tokens, left_out), plan, left_out)
        for piece in _capped(distinct, plan, tokens, left_out):
            offered[name, age(piece, plan.fresh_since_unix)].append(piece)
    budgets = _budgets(offered, plan, tokens, by_class)
    chosen = [
        one for key in sorted(offered) for one in offered[key] if _spend(budgets, key, one, left_out, "over_budget")
    ]
    return chosen, left_out


def age(piece: TextSpan, fresh_since_unix: float) -> Age:
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


def _lot(piece: TextSpan, seed: int) -> bytes:
    """Return a key that orders pieces at random, and always alike for a seed."""
    name = f"{seed}/{piece.session_id}/{piece.start}/{piece.first}"
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _considered(
    pieces: Iterable[TextSpan], plan: DatasetPlan, tokens: int, left_out: Counter[str]
) -> Iterator[TextSpan]:
    """Yield the first pieces of each age, enough to fill the budget after duplicates and caps."""
    budgets = dict.fromkeys(get_args(Age), _CONSIDERED * tokens)
    return (one for one in pieces if _spend(budgets, age(one, plan.fresh_since_unix), one, left_out, "over_budget"))


def _distinct(pieces: Iterable[TextSpan], plan: DatasetPlan, left_out: Counter[str]) -> list[TextSpan]:
    """Leave out a piece that is nearly equal to as many others as the plan's `copies`."""
    seen: Counter[int] = Counter()
    kept = []
    for piece in pieces:
        hashes = shingles(piece.tokens).tolist()
        repeated = sum(seen[one] >= plan.copies for one in hashes)
        if repeated >= plan.repeated_share * len(hashes):
            left_out["duplicates"] += piece.label_count
            continue
        seen.update(hashes)
        kept.append(piece)
    return kept


def _capped(pieces: Sequence[TextSpan], plan: DatasetPlan, tokens: int, left_out: Counter[str]) -> list[TextSpan]:
    """Cap each tenant within the class that the pieces are of."""
    amounts: Counter[str] = Counter()
    for piece in pieces:
        amounts[piece.tenant] += piece.label_count
    if len(amounts) < 2:
        return list(pieces)
    budgets = dict.fromkeys(amounts, tenant_cap(amounts.values(), plan.tenant_share, plan.tenant_floor(tokens)))
    return [piece for piece in pieces if _spend(budgets, piece.tenant, piece, left_out, "over_cap")]


def _capped_over_all(
    pieces: Sequence[TextSpan], plan: DatasetPlan, tokens: int, left_out: Counter[str]
) -> list[TextSpan]:
    """Cap each tenant over all classes, since it names them as it likes. It gives of all its classes and ages alike."""
    amounts: dict[str, Counter[tuple[str, Age]]] = defaultdict(Counter)
    for piece in pieces:
        amounts[piece.tenant][piece.traffic_class, age(piece, plan.fresh_since_unix)] += piece.label_count
    if len(amounts) < 2:
        return list(pieces)
    offered = [of_tenant.total() for of_tenant in amounts.values()]
    # If there is more than the budget, a tenant has its share of the budget: others can fill the rest.
    share = max(plan.tenant_share, 1 / len(amounts))
    cap = max(min(tenant_cap(offered, share, 0), int(share * tokens)), plan.tenant_floor(tokens))
    budgets = {
        (tenant, *kind): budget
        for tenant, of_tenant in amounts.items()
        for kind, budget in (water_filled(of_tenant, {}, cap) if of_tenant.total() > cap else of_tenant).items()
    }
    keys = ((one.tenant, one.traffic_class, age(one, plan.fresh_since_unix)) for one in pieces)
    return [one for one, key in zip(pieces, keys, strict=True) if _spend(budgets, key, one, left_out, "over_cap")]


def _spend(budgets: dict[_Key, int], key: _Key, piece: TextSpan, left_out: Counter[str], reason: str) -> bool:
    """Take a piece's labels from a budget; return False, and count them as left out, if they do not fit."""
    if budgets[key] < piece.label_count:
        left_out[reason] += piece.label_count
        return False
    budgets[key] -= piece.label_count
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
    offered: Mapping[tuple[str, Age], Sequence[TextSpan]], plan: DatasetPlan, tokens: int, by_class: bool
) -> dict[tuple[str, Age], int]:
    """Divide `tokens` among classes and ages; all of it is old traffic where nothing is fresh."""
    amounts = {key: sum(piece.label_count for piece in some) for key, some in offered.items()}
    if by_class:
        return _budgets_by_class(amounts, plan, tokens)
    old = {name: amount for (name, age), amount in amounts.items() if age == "old"}
    fresh = {name: amount for (name, age), amount in amounts.items() if age == "fresh"}
    wanted = min(sum(fresh.values()), tokens * (1 - plan.replay_share))
    replayed = tokens if not fresh else int(wanted * plan.replay_share / (1 - plan.replay_share))
    replay = water_filled(old, {}, replayed)
    new = water_filled(fresh, {}, tokens - sum(replay.values()))
    return {(name, "old"): n for name, n in replay.items()} | {(name, "fresh"): n for name, n in new.items()}


def _budgets_by_class(
    amounts: Mapping[tuple[str, Age], int], plan: DatasetPlan, tokens: int
) -> dict[tuple[str, Age], int]:
    """Divide `tokens` among classes, and the part of each by the replay share among its ages."""
    classes: Counter[str] = Counter()
    for (name, _), amount in amounts.items():
        classes[name] += amount
    ages: dict[Age, float] = {"old": plan.replay_share, "fresh": 1 - plan.replay_share}
    budgets: dict[tuple[str, Age], int] = {}
    for name, budget in water_filled(classes, {}, tokens).items():
        of_class = {age: amount for (one, age), amount in amounts.items() if one == name}
        for each, given in water_filled(of_class, ages, budget).items():
            budgets[name, each] = given
    return budgets
