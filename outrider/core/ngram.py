"""Predict the next token of a text from counts of what followed the same tokens in it before.

The prediction mixes contexts of 1 to ORDER tokens by Witten-Bell smoothing: a context that was followed by few kinds of
tokens is trusted more than one that was followed by many (Witten and Bell, 1991). Without any model it proposes what
look-up in the prompt finds (LLMA, arXiv 2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import BadRequest

ORDER = 6
"""Tokens of the longest context; 4, 6 and 8 predict equally well."""
FOLLOWERS = 16
"""The most frequent followers of a context that are looked at; the others count as tokens that were not found."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_START = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1
_BLOCK = 1024
"""Tokens that are counted one by one before they come into a table: about 1,600 bytes each until then."""
_LONGEST = 1 << 13
"""Tokens of the longest table that is made anew when others come; a step waits for it, about a microsecond each."""
_LARGEST = 2**31 - 1
"""The greatest token id."""


@dataclass(frozen=True)
class _Table:
    """Holds which tokens followed which contexts of a text, and how often.

    A context is known by a hash of its tokens. Two contexts with one hash would be taken for one another, which costs a
    wrong proposal and nothing else.
    """

    contexts: NDArray[np.uint64]
    """`[F]`: hash of the context of each follower, in ascending order."""
    tokens: NDArray[np.int64]
    """`[F]`: followers, the most frequent ones of a context first."""
    counts: NDArray[np.int64]
    """`[F]`: how often each of them followed."""
    keys: NDArray[np.uint64]
    """`[C]`: the contexts, each once."""
    starts: NDArray[np.int64]
    """`[C + 1]`: index of each context's first follower; the last one is F."""
    totals: NDArray[np.int64]
    """`[C]`: occurrences of each context."""

    @classmethod
    def of(cls, text: NDArray[np.int64], first: int = 0) -> _Table:
        """Count the contexts of a text. first: index of the first token that may follow one."""
        found, followers = [np.empty(0, np.uint64)], [text[:0]]
        hashes = np.full(len(text), _START, dtype=np.uint64)
        for order in range(1, min(ORDER, len(text) - 1) + 1):
            # hashes[i] becomes that of the `order` tokens that end at i; those before i = order - 1 are no contexts.
            earlier = text[: len(text) - order + 1].astype(np.uint64)
            hashes[order - 1 :] = hashes[order - 1 :] * np.uint64(_MULTIPLIER) + earlier
            begin = max(order, first)
            found.append(hashes[begin - 1 : -1].copy())
            followers.append(text[begin:])
        contexts, tokens = np.concatenate(found), np.concatenate(followers)
        # One key for each pair sorts several times as fast as two keys.
        pairs = (contexts ^ np.uint64(_START)) * np.uint64(_MULTIPLIER) + tokens.astype(np.uint64)
        by_pair = np.argsort(pairs)
        firsts = _firsts(pairs[by_pair])
        counts = np.diff(firsts, append=len(pairs))
        contexts, tokens = contexts[by_pair[firsts]], tokens[by_pair[firsts]]
        by_context = np.lexsort((-counts, contexts))
        contexts, tokens, counts = contexts[by_context], tokens[by_context], counts[by_context]
        starts = _firsts(contexts)
        totals = np.add.reduceat(counts, starts) if len(starts) else counts
        return cls(contexts, tokens, counts, contexts[starts], np.append(starts, len(contexts)), totals)

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
        columns = self.starts[indices], self.starts[indices + 1], self.totals[indices]
        for first, end, total in zip(*(column.tolist() for column in columns), strict=True):
            shown = slice(first, min(end, first + FOLLOWERS))
            entries.append((total, end - first, self.tokens[shown].tolist(), self.counts[shown].tolist()))
        return entries


class NgramModel:
    """Predicts the next token of a growing text. Not thread-safe.

    What was there at first is in one table. What was added is in others, of which the last is made anew for each block
    that has come until it is long; the tokens after it are counted one by one.
    """

    def __init__(self) -> None:
        """Begin with an empty text."""
        self._tail: list[int] = []
        """The last ORDER tokens of the text, the latest one first."""
        self.reset(())

    def reset(self, tokens: Sequence[int]) -> None:
        """Replace the text. It takes about 1 microsecond for each token. Raises BadRequest for what is no token id."""
        text = _ids(tokens)
        self._tables = [_Table.of(text), _Table.of(text[:0])]
        self._before, self._added = text[-ORDER:], text[:0]
        """The text of the last table, and the end of what is before it."""
        self._begin_block()

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, in microseconds for each. Raises BadRequest, and appends none, if one is no id."""
        if len(self._block) + len(tokens) >= _BLOCK:
            self._added = np.append(self._added, _ids([*self._block, *tokens]))
            text = np.append(self._before, self._added)
            self._tables[-1] = _Table.of(text, len(self._before))
            if len(self._added) >= _LONGEST:
                self._tables.append(_Table.of(text[:0]))
                self._before, self._added = text[-ORDER:], text[:0]
            self._begin_block()
            return
        _check_ids(tokens)
        self._block += tokens
        for token in tokens:
            for context in _hashes(self._tail):
                followers = self._recent.setdefault(context, {})
                followers[token] = followers.get(token, 0) + 1
            self._tail = [token, *self._tail[: ORDER - 1]]

    def _begin_block(self) -> None:
        """Begin to count tokens one by one."""
        self._block: list[int] = []
        """Tokens that are in no table."""
        self._recent: dict[int, dict[int, int]] = {}
        """Hash of a context -> follower -> count, of the block's tokens."""
        self._tail = np.append(self._before, self._added)[: -ORDER - 1 : -1].tolist()

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


def _firsts(rising: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the index of the first of each run of equal values."""
    return np.flatnonzero(np.diff(rising, prepend=rising[:1] ^ np.uint64(1)))


def _check_ids(tokens: Sequence[int]) -> None:
    for token in tokens:
        if not 0 <= token <= _LARGEST:
            raise BadRequest(f"token id {token} cannot be counted, must be 0 to {_LARGEST}", field="tokens")


def _ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    """Return token ids as an array. Raises BadRequest for what is none."""
    try:
        ids = np.asarray(tokens, dtype=np.int64)
    except OverflowError:
        _check_ids(tokens)
        raise
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
