"""Predict the next token from counts of what followed the same tokens before: in a text, and in a store of other texts.

The prediction mixes contexts of 1 to ORDER tokens by Witten-Bell smoothing: a context that was followed by few kinds of
tokens is trusted more than one that was followed by many (Witten and Bell, 1991). Without any model it proposes what
look-up in the prompt finds (LLMA, arXiv 2304.04487) and, with a store, what retrieval finds (REST, arXiv 2311.08252).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from heapq import nlargest
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import BadRequest

ORDER = 6
"""Tokens of the longest context; 4, 6 and 8 predict equally well on the demo pair."""
FOLLOWERS = 16
"""The most frequent followers of a context that are looked at; the others count as tokens that were not found."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_START = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1
_CHUNK = 1 << 20
"""Tokens that are counted at once, which bounds the memory of a build to about 100 bytes a token of a chunk."""
_BLOCK = 1024
"""Tokens that are added one by one before they become a table: about 1,600 bytes each until then."""
_RUNS = 4
"""Tables of tokens that were added, while these are short; each costs a search in every look-up."""
_LONGEST_RUN = 1 << 14
"""Tokens of the longest table that is made by merging others."""
_LARGEST = 2**31 - 1
"""The greatest token id."""


@dataclass(frozen=True)
class NgramTable:
    """Holds which tokens followed which contexts, and how often, as arrays that may be memory-mapped.

    A context is known by a hash of its tokens. Two contexts with one hash would be taken for one another, which costs a
    wrong proposal and nothing else.
    """

    keys: NDArray[np.uint64]
    """`[C]`: hashes of the contexts, in ascending order."""
    starts: NDArray[np.int64]
    """`[C + 1]`: index of each context's first follower; the last one is F."""
    totals: NDArray[np.int64]
    """`[C]`: occurrences of each context."""
    tokens: NDArray[np.int32]
    """`[F]`: followers, the most frequent ones of a context first."""
    counts: NDArray[np.int32]
    """`[F]`: how often each of them followed."""

    @classmethod
    def build(cls, sequences: Iterable[Sequence[int]], *, least_sequences: int = 1) -> NgramTable:
        """Count the contexts of sequences of token ids.

        least_sequences: n-grams, that is a context with its follower, of fewer sequences are left out. Numbers that
        are no token ids may separate parts of a sequence; raises BadRequest if such an n-gram is not left out.
        """
        parts: list[_Pairs] = []
        pending: list[_Pairs] = []
        length = 0
        for sequence in sequences:
            pairs = _pairs_of(_ids(sequence))
            pending.append(pairs)
            length += len(pairs.tokens)
            if length >= ORDER * _CHUNK:
                parts, pending, length = [_merged([*parts, *pending])], [], 0
        merged = _merged([*parts, *pending])
        kept = merged.where(merged.sequences >= least_sequences)
        _checked(kept.tokens)
        return cls._of_pairs(kept)

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> NgramTable:
        """Return the table of arrays by name, as `arrays` gave them.

        Reads them once, to check them. Raises BadRequest if they are not those of a table.
        """
        missing = [one.name for one in fields(cls) if one.name not in arrays]
        if missing:
            raise BadRequest(f"an n-gram table lacks {', '.join(missing)}; build it again", field="store")
        table = cls(**{one.name: arrays[one.name] for one in fields(cls)})
        if not table._sound():
            raise BadRequest("the arrays of an n-gram table do not fit together; build it again", field="store")
        return table

    def within(self, max_bytes: int) -> NgramTable:
        """Return the table without its rarest n-grams, as many as it takes for the arrays to have no more bytes.

        A shorter context is no rarer than one that it ends, so what stays can be reached.
        """
        if not len(self.tokens) or sum(array.nbytes for array in self.arrays().values()) <= max_bytes:
            return self
        followers, contexts = np.sort(self.counts), np.sort(self.counts[self.starts[:-1]])
        least = np.append(np.unique(followers), followers[-1] + 1)
        each = 8 * (len(followers) - np.searchsorted(followers, least))
        each += 24 * (len(contexts) - np.searchsorted(contexts, least)) + 8
        bound = least[np.argmax(each <= max_bytes)]
        kept = self.counts >= bound
        lengths = np.add.reduceat(kept, self.starts[:-1], dtype=np.int64)
        totals = np.add.reduceat(np.where(kept, self.counts, 0), self.starts[:-1], dtype=np.int64)
        stay = lengths > 0
        starts = np.concatenate(([0], np.cumsum(lengths[stay]))).astype(np.int64)
        return NgramTable(self.keys[stay], starts, totals[stay], self.tokens[kept], self.counts[kept])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def followers(self, hashes: Sequence[int]) -> list[tuple[int, int, list[int], list[int]]]:
        """Return (occurrences, kinds of followers, the most frequent ones, their counts) of each context.

        hashes: of contexts that continue one another, the shortest first; those from the first unknown one on are left
        out.
        """
        if not len(self.keys) or not hashes:
            return []
        wanted = np.array(hashes, dtype=np.uint64)
        indices = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        unknown = self.keys[indices] != wanted
        indices = indices[: int(np.argmax(unknown)) if unknown.any() else len(hashes)]
        entries = []
        bounds = zip(
            self.starts[indices].tolist(), self.starts[indices + 1].tolist(), self.totals[indices].tolist(), strict=True
        )
        for first, end, total in bounds:
            shown = slice(first, min(end, first + FOLLOWERS))
            entries.append((total, end - first, self.tokens[shown].tolist(), self.counts[shown].tolist()))
        return entries

    @classmethod
    def _of_pairs(cls, pairs: _Pairs) -> NgramTable:
        order = np.lexsort((-pairs.counts, pairs.contexts))
        return cls._of_sorted(pairs.where(order))

    @classmethod
    def _of_sorted(cls, pairs: _Pairs) -> NgramTable:
        """Return the table of distinct pairs by ascending contexts, those of one context by falling counts."""
        starts = np.flatnonzero(np.diff(pairs.contexts, prepend=pairs.contexts[:1] ^ np.uint64(1)))
        totals = np.add.reduceat(pairs.counts, starts) if len(starts) else np.empty(0, np.int64)
        bounds = np.append(starts, len(pairs.contexts)).astype(np.int64)
        counts = np.minimum(pairs.counts, 2**31 - 1).astype(np.int32)
        return cls(pairs.contexts[starts], bounds, totals.astype(np.int64), pairs.tokens.astype(np.int32), counts)

    def _with(self, other: NgramTable) -> NgramTable:
        """Return the counts of both tables. What only one of them knows is in order already, which saves most time."""
        parts, shared = [], []
        for own, others in ((self, other), (other, self)):
            pairs = own._pairs()
            at = np.minimum(np.searchsorted(others.keys, own.keys), len(others.keys) - 1)
            both = np.repeat(others.keys[at] == own.keys, np.diff(own.starts))
            parts.append(pairs.where(~both))
            shared.append(pairs.where(both))
        joined = _joined([*parts, NgramTable._of_pairs(_merged(shared))._pairs()])
        return NgramTable._of_sorted(joined.where(np.argsort(joined.contexts, kind="stable")))

    def _pairs(self) -> _Pairs:
        contexts, counts = np.repeat(self.keys, np.diff(self.starts)), self.counts.astype(np.int64)
        return _Pairs(contexts, self.tokens.astype(np.int64), counts, counts)

    def _sound(self) -> bool:
        """Return whether every look-up stays within the arrays and finds sensible numbers."""
        types = {"keys": "u8", "starts": "i8", "totals": "i8", "tokens": "i4", "counts": "i4"}
        if any(a.dtype != np.dtype(types[name]) or a.ndim != 1 for name, a in self.arrays().items()):
            return False
        contexts, followers = len(self.keys), len(self.tokens)
        if len(self.starts) != contexts + 1 or len(self.totals) != contexts or len(self.counts) != followers:
            return False
        if self.starts[0] != 0 or self.starts[-1] != followers or bool(np.any(self.starts[1:] <= self.starts[:-1])):
            return False
        if bool(np.any(self.keys[1:] <= self.keys[:-1])) or bool(np.any(self.tokens < 0)):
            return False
        return not contexts or bool(
            np.all(self.counts > 0)
            and np.all(np.add.reduceat(self.counts, self.starts[:-1], dtype=np.int64) <= self.totals)
        )


class NgramModel:
    """Predicts the next token of a growing text from the text itself and from stores. Not thread-safe."""

    def __init__(self, stores: Sequence[NgramTable] = ()) -> None:
        """Begin with an empty text. stores: tables of other texts, which count as if they stood before it."""
        self._stores = tuple(stores)
        self._recent: dict[int, dict[int, int]] = {}
        """Hash of a context -> follower -> count, of the block's tokens."""
        self._tail: list[int] = []
        """The last ORDER tokens of the text, the latest one first."""
        self.reset(())

    def reset(self, tokens: Sequence[int]) -> None:
        """Replace the text. It takes about 1 microsecond for each token. Raises BadRequest for what is no token id."""
        self._text = [NgramTable._of_pairs(_pairs_of(_checked(_ids(tokens))))] if tokens else []
        """The table of this text."""
        self._runs: list[tuple[int, NgramTable]] = []
        """(tokens, table) of parts of what was added since, in the text's order."""
        self.use(self._stores)
        self._begin_block(tokens)

    def use(self, stores: Sequence[NgramTable]) -> None:
        """Replace the stores, and keep the text."""
        self._stores = tuple(stores)
        self._tables = (*self._stores, *self._text, *(run for _, run in self._runs))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, in microseconds for each. Raises BadRequest, and appends none, if one is no id."""
        if len(self._block) + len(tokens) >= _BLOCK:
            self._fold([*self._block, *tokens])
            return
        _check_ids(tokens)
        self._block += tokens
        for token in tokens:
            for context in _hashes(self._tail):
                followers = self._recent.setdefault(context, {})
                followers[token] = followers.get(token, 0) + 1
            self._tail = [token, *self._tail[: ORDER - 1]]

    def _fold(self, tokens: Sequence[int]) -> None:
        """Make a table of the block and what follows it, which takes a tenth of the memory, and merge it with others.

        As in a log-structured merge tree (O'Neil et al., 1996) a table is merged with one that is no longer, so that
        a token is counted anew a few times and few tables are asked. Long ones stay apart: a merge takes two
        microseconds a token, in which whoever asks waits.
        """
        text = _checked(_ids([*self._before, *tokens]))
        length, table = len(tokens), NgramTable._of_pairs(_pairs_of(text, len(self._before)))
        while self._runs and (self._runs[-1][0] <= length or len(self._runs) >= _RUNS):
            if self._runs[-1][0] + length > _LONGEST_RUN:
                break
            before, other = self._runs.pop()
            length, table = before + length, other._with(table)
        self._runs.append((length, table))
        self.use(self._stores)
        self._begin_block(text.tolist())

    def _begin_block(self, text: Sequence[int]) -> None:
        """Begin to count tokens one by one. text: all before them, or its end."""
        self._block: list[int] = []
        """Tokens that are in no table."""
        self._before = list(text[-ORDER:])
        """Those that stand before them."""
        self._recent = {}
        self._tail = self._before[::-1]

    def following(self, path: Sequence[int] = ()) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return token ids and the logarithms of their probability after the text and `path`, most probable first.

        Both are `[n]`. What is missing of a sum of 1 is the probability of all tokens that were not found.
        """
        mixed: dict[int, float] = {}
        contexts = _hashes([*path[: -ORDER - 1 : -1], *self._tail][:ORDER])
        found = [table.followers(contexts) for table in self._tables]
        for order, context in enumerate(contexts):
            entries = [one[order] for one in found if order < len(one)]
            recent = self._recent.get(context)
            if recent:
                latest = nlargest(FOLLOWERS, recent, key=recent.__getitem__) if len(recent) > 1 else list(recent)
                entries.append((sum(recent.values()), len(recent), latest, [recent[token] for token in latest]))
            if not entries:
                break  # a longer context was not seen either
            # Tables may share followers that are not looked at: the kinds are at most too many, which trusts it less.
            total, kinds = sum(entry[0] for entry in entries), sum(entry[1] for entry in entries)
            if len(entries) > 1:
                shown = [token for entry in entries for token in entry[2]]
                kinds -= len(shown) - len(set(shown))
            weight = 1.0 / (total + kinds)
            mixed = {token: share * kinds * weight for token, share in mixed.items()}
            for _, _, tokens, counts in entries:
                for token, count in zip(tokens, counts, strict=True):
                    mixed[token] = mixed.get(token, 0.0) + weight * count
        best = sorted(mixed.items(), key=itemgetter(1), reverse=True)[:FOLLOWERS]
        return np.array([token for token, _ in best], np.int64), np.log([share for _, share in best], dtype=np.float64)


@dataclass(frozen=True)
class _Pairs:
    """Contexts with one follower each, every array `[n]`."""

    contexts: NDArray[np.uint64]
    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]
    sequences: NDArray[np.int64]
    """In how many sequences the pair occurs."""

    def where(self, kept: NDArray[np.bool_] | NDArray[np.intp]) -> _Pairs:
        return _Pairs(self.contexts[kept], self.tokens[kept], self.counts[kept], self.sequences[kept])


def _pairs_of(text: NDArray[np.int64], first: int = 0) -> _Pairs:
    """Return the distinct (context, follower) of one sequence. first: index of the first token that may follow."""
    contexts, followers = [], []
    hashes = np.full(len(text), _START, dtype=np.uint64)
    for order in range(1, min(ORDER, len(text) - 1) + 1):
        # hashes[i] becomes that of the `order` tokens that end at i; those before i = order - 1 are no contexts.
        hashes[order - 1 :] = hashes[order - 1 :] * np.uint64(_MULTIPLIER) + text[: len(text) - order + 1].astype(
            np.uint64
        )
        begin = max(order, first)
        contexts.append(hashes[begin - 1 : -1].copy())
        followers.append(text[begin:])
    if not contexts:
        return _Pairs(np.empty(0, np.uint64), *(np.empty(0, np.int64) for _ in range(3)))
    all_contexts, all_followers = np.concatenate(contexts), np.concatenate(followers)
    ones = np.ones(len(all_contexts), np.int64)
    pairs = _merged([_Pairs(all_contexts, all_followers, ones, ones)])
    return _Pairs(pairs.contexts, pairs.tokens, pairs.counts, np.ones(len(pairs.tokens), np.int64))


def _merged(parts: Sequence[_Pairs]) -> _Pairs:
    """Return the distinct pairs of all parts, with the sums of their counts."""
    if not parts:
        return _pairs_of(np.empty(0, np.int64))
    all_ = _joined(parts)
    if not len(all_.tokens):
        return parts[0]
    # One key for each pair sorts several times as fast as two keys.
    pairs = (all_.contexts ^ np.uint64(_START)) * np.uint64(_MULTIPLIER) + all_.tokens.astype(np.uint64)
    order = np.argsort(pairs)
    firsts = np.flatnonzero(np.append(True, np.diff(pairs[order]) != 0))
    first = order[firsts]
    counts, sequences = (np.add.reduceat(column[order], firsts) for column in (all_.counts, all_.sequences))
    return _Pairs(all_.contexts[first], all_.tokens[first], counts, sequences)


def _joined(parts: Sequence[_Pairs]) -> _Pairs:
    columns = ([getattr(one, column.name) for one in parts] for column in fields(_Pairs))
    return _Pairs(*(np.concatenate(column) for column in columns))


def _check_ids(tokens: Sequence[int]) -> None:
    for token in tokens:
        if not 0 <= token <= _LARGEST:
            raise BadRequest(f"token id {token} cannot be counted, must be 0 to {_LARGEST}", field="tokens")


def _ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    try:
        return np.asarray(tokens, dtype=np.int64)
    except OverflowError:
        _check_ids(tokens)
        raise


def _checked(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    _check_ids(ids[(ids < 0) | (ids > _LARGEST)][:1].tolist())
    return ids


def _hashes(latest: Sequence[int]) -> list[int]:
    """Return the hashes of the contexts of 1, 2, ... tokens that end a text.

    latest: its last tokens, the last one first.
    """
    hashes, value = [], _START
    for token in latest:
        value = (value * _MULTIPLIER + token) & _MASK
        hashes.append(value)
    return hashes
