"""Which stretches a draft learns from: a replay mix of fresh and old traffic, fair to classes and tenants. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.distill.data.spans import Stretch

Age = Literal["fresh", "old"]
_Key = TypeVar("_Key", bound=Hashable)
OTHERS = "(others)"
"""What the classes are called together that are too many to be told apart."""
_CONSIDERED = 8
"""Times the budget that is compared: a log may hold a thousand times of it, and every piece compared takes memory."""
_SHINGLE = 8
"""Tokens of the pieces by which texts are compared: long enough that two texts rarely share one by chance."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Limits:
    """What the selection keeps to. Tokens are those that are learnt from."""

    tokens: int
    replay_share: float
    """Part of the tokens that is old traffic."""
    by_class: bool
    """Each class has its share, whatever the age of its texts, and the replay share rules within a class only. Else a
    class that is old has part in the replay share alone."""
    class_shares: Mapping[str, float]
    """Weights of the traffic classes; those not named weigh 1."""
    tenant_share: float
    """No tenant gives more of a class, or of the whole, than this part, but for `tenant_tokens`, which any may give."""
    tenant_tokens: int
    copies: int
    """Texts nearly alike that are taken."""
    repeated_share: float
    """A text is nearly like others if this part of its pieces is in them."""
    fresh_since_unix: float
    seed: int


def select(pieces: Sequence[Stretch], limits: Limits) -> tuple[list[Stretch], Counter[str]]:
    """Choose pieces for a dataset, by a lot that is the same for the same seed. Also says how many tokens were left
    out as `duplicates`, `over_cap` and `over_budget`.
    """
    left_out: Counter[str] = Counter()
    by_class: dict[str, list[Stretch]] = defaultdict(list)
    for piece in _shared_out(sorted(pieces, key=lambda one: _lot(one, limits.seed)), limits, left_out):
        by_class[piece.traffic_class].append(piece)
    offered: dict[tuple[str, Age], list[Stretch]] = defaultdict(list)
    for name, some in by_class.items():
        for piece in _capped(_distinct(_considered(some, limits, left_out), limits, left_out), limits, left_out):
            offered[name, age(piece, limits.fresh_since_unix)].append(piece)
    budgets = _budgets(offered, limits)
    chosen = [piece for key in sorted(offered) for piece in _within(offered[key], budgets[key], left_out)]
    return chosen, left_out


def age(piece: Stretch, fresh_since_unix: float) -> Age:
    return "fresh" if piece.time_unix >= fresh_since_unix else "old"


def water_filled(available: Mapping[_Key, int], weights: Mapping[_Key, float], total: int) -> dict[_Key, int]:
    """Share `total` out by weight; what one has no use for goes to the others."""
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
    """Return how many tokens of a class one tenant may give, so that none gives more than `share` of what is given.

    A share that so few tenants cannot keep to is raised to an equal part each. At least `floor`: a small tenant must
    not starve a large one. Of a single tenant everything is taken.
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
    """Return the distinct hashes of all pieces of `_SHINGLE` tokens; of a shorter text the hash of the whole."""
    width = min(_SHINGLE, len(tokens))
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), width)
    hashes = np.zeros(len(windows), np.uint64)
    for column in range(width):
        hashes = (hashes ^ windows[:, column]) * _ODD
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


def _lot(piece: Stretch, seed: int) -> bytes:
    name = f"{seed}/{piece.session_id}/{piece.start}/{piece.first}"
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _considered(pieces: Iterable[Stretch], limits: Limits, left_out: Counter[str]) -> Iterator[Stretch]:
    """Of each age the first that come, enough of them for duplicates and caps to leave a budget's worth."""
    budgets = dict.fromkeys(get_args(Age), _CONSIDERED * limits.tokens)
    for piece in pieces:
        which = age(piece, limits.fresh_since_unix)
        if budgets[which] < piece.learnt:
            left_out["over_budget"] += piece.learnt
            continue
        budgets[which] -= piece.learnt
        yield piece


def _distinct(pieces: Iterable[Stretch], limits: Limits, left_out: Counter[str]) -> list[Stretch]:
    """Leave out a text that `copies` others are nearly like."""
    seen: Counter[int] = Counter()
    kept = []
    for piece in pieces:
        hashes = shingles(piece.tokens).tolist()
        repeated = sum(seen[one] >= limits.copies for one in hashes)
        if repeated >= limits.repeated_share * len(hashes):
            left_out["duplicates"] += piece.learnt
            continue
        seen.update(hashes)
        kept.append(piece)
    return kept


def _capped(pieces: Sequence[Stretch], limits: Limits, left_out: Counter[str]) -> list[Stretch]:
    amounts: Counter[str] = Counter()
    for piece in pieces:
        amounts[piece.tenant] += piece.learnt
    if len(amounts) < 2:
        return list(pieces)
    cap = tenant_cap(amounts.values(), limits.tenant_share, limits.tenant_tokens)
    given: Counter[str] = Counter()
    kept = []
    for piece in pieces:
        if given[piece.tenant] + piece.learnt > cap:
            left_out["over_cap"] += piece.learnt
            continue
        given[piece.tenant] += piece.learnt
        kept.append(piece)
    return kept


def _shared_out(pieces: Sequence[Stretch], limits: Limits, left_out: Counter[str]) -> list[Stretch]:
    """Cap each tenant over all classes, which are whatever it says they are. What it may give is of all its classes
    and ages alike."""
    amounts: dict[str, Counter[tuple[str, Age]]] = defaultdict(Counter)
    for piece in pieces:
        amounts[piece.tenant][_kind(piece, limits)] += piece.learnt
    if len(amounts) < 2:
        return list(pieces)
    sums = [of.total() for of in amounts.values()]
    # Where there is more than the budget, its share of that; the others can fill the rest, as they can fill the cap.
    share = max(limits.tenant_share, 1 / len(amounts))
    cap = max(min(tenant_cap(sums, share, 0), int(share * limits.tokens)), limits.tenant_tokens)
    left = {tenant: water_filled(of, {}, cap) for tenant, of in amounts.items() if of.total() > cap}
    kept = []
    for piece in pieces:
        budget = left.get(piece.tenant)
        if budget is not None:
            if budget[_kind(piece, limits)] < piece.learnt:
                left_out["over_cap"] += piece.learnt
                continue
            budget[_kind(piece, limits)] -= piece.learnt
        kept.append(piece)
    return kept


def _kind(piece: Stretch, limits: Limits) -> tuple[str, Age]:
    return piece.traffic_class, age(piece, limits.fresh_since_unix)


def class_names(amounts: Mapping[str, Mapping[str, int]], most: int, named: Collection[str]) -> dict[str, str]:
    """Return what each class is called: its name, or `OTHERS` for all but the `most` largest and those `named`.

    amounts: tenant -> class -> tokens. A tenant's tokens count by its number of classes, lest it crowd others' out by
    inventing some.
    """
    sizes: dict[str, float] = defaultdict(float)
    for of in amounts.values():
        for name, tokens in of.items():
            sizes[name] += tokens / len(of)
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:most]
    return {name: name if name in largest or name in named else OTHERS for name in sizes}


def _budgets(offered: Mapping[tuple[str, Age], Sequence[Stretch]], limits: Limits) -> dict[tuple[str, Age], int]:
    """Fresh traffic, and old in its share of the whole; all old where nothing is fresh."""
    amounts = {key: sum(piece.learnt for piece in some) for key, some in offered.items()}
    if limits.by_class:
        return _budgets_by_class(amounts, limits)
    old = {name: amount for (name, age), amount in amounts.items() if age == "old"}
    fresh = {name: amount for (name, age), amount in amounts.items() if age == "fresh"}
    wanted = min(sum(fresh.values()), limits.tokens * (1 - limits.replay_share))
    replayed = limits.tokens if not fresh else int(wanted * limits.replay_share / (1 - limits.replay_share))
    replay = water_filled(old, limits.class_shares, replayed)
    new = water_filled(fresh, limits.class_shares, limits.tokens - sum(replay.values()))
    return {(name, "old"): n for name, n in replay.items()} | {(name, "fresh"): n for name, n in new.items()}


def _budgets_by_class(amounts: Mapping[tuple[str, Age], int], limits: Limits) -> dict[tuple[str, Age], int]:
    classes: Counter[str] = Counter()
    for (name, _), amount in amounts.items():
        classes[name] += amount
    ages: dict[Age, float] = {"old": limits.replay_share, "fresh": 1 - limits.replay_share}
    budgets: dict[tuple[str, Age], int] = {}
    for name, budget in water_filled(classes, limits.class_shares, limits.tokens).items():
        mine = {age: amount for (one, age), amount in amounts.items() if one == name}
        for each, given in water_filled(mine, ages, budget).items():
            budgets[name, each] = given
    return budgets


def _within(pieces: Iterable[Stretch], budget: int, left_out: Counter[str]) -> Iterable[Stretch]:
    for piece in pieces:
        if piece.learnt > budget:
            left_out["over_budget"] += piece.learnt
            continue
        budget -= piece.learnt
        yield piece
