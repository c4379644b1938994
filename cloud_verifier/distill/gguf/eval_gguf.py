"""Measures drafts as devices run them: the quantised file, in llama.cpp, on texts that the target wrote.

Every draft reads the same text, and its guesses at each position are compared with the token that is there. With greedy
drafting and one text that settles every fixed shape: of a tree only the nodes on the text's own path matter, and which
they are follows from the rank that the draft gave each token. Two shapes are counted:

    chain   6 nodes, each the draft's first guess after the one before
    tree    12 nodes, two wide: the chain, and beside each of its nodes the draft's second guess, which ends the path

A step commits what the shape got right and the target's own next token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.llama import LlamaModel, TextReader, TreeContext, measure_widths

CHAIN = 6
"""Nodes of the chain, and levels of the tree."""
TREE = 2
"""Guesses at each level of the tree."""
CONTEXT = 1_024
"""Tokens of a text that are read at most."""
UNPROMPTED = 8
"""First tokens of a text at which no guess counts: the prompt, from which a draft would know, is often not recorded. A
prompt that is stands before the text's `first`, and takes their place."""
_ROUNDS = 25
_LEAST_ROUNDS = 3
_TIMED_S = 10.0
"""After so many seconds no further round begins."""
_HELD = 128
"""Tokens that a draft holds while its decodes are timed."""

Ranks = NDArray[np.int8]


class HeldOut(Protocol):
    """What is asked of a text: the dataset's have more."""

    @property
    def traffic_class(self) -> str: ...
    @property
    def session(self) -> int: ...
    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def first(self) -> int:
        """Position of the first token that counts; those before are context."""


@dataclass(frozen=True)
class Counts:
    """What one draft did on one text."""

    right: int
    """First guesses that were the text's token."""
    chain_steps: int
    """Steps that the text takes with the chain."""
    tree_steps: int


@dataclass(frozen=True)
class TextCounts:
    """Two drafts on one text."""

    traffic_class: str
    session: int
    """Texts of one session are alike: they are one piece of evidence."""
    positions: int
    """Tokens that were guessed."""
    candidate: Counts
    incumbent: Counts


@dataclass(frozen=True)
class Measured:
    """Two drafts side by side."""

    texts: tuple[TextCounts, ...]
    candidate_ms: float
    """Milliseconds for a token, one at a time, with `_HELD` tokens held: the best of rounds that took turns, since
    what else runs on the machine only adds to it."""
    incumbent_ms: float


def compare(candidate: Path, incumbent: Path, texts: Iterable[HeldOut], threads: int = 1) -> Measured:
    """Measure two GGUF files on the same texts.

    Texts that are too short to count, or hold ids that a draft lacks, are left out. Raises ModelRefused.
    """
    with LlamaModel.load(candidate, threads=threads) as new, LlamaModel.load(incumbent, threads=threads) as old:
        length, ids = min(CONTEXT, new.n_ctx_train, old.n_ctx_train), min(new.vocab_size, old.vocab_size)
        fitting = [
            text for text in texts if _first(text) < min(length, len(text.tokens)) and int(text.tokens.max()) < ids
        ]
        with (
            TextReader(new, length=length, threads=threads) as ours,
            TextReader(old, length=length, threads=threads) as theirs,
        ):
            counted = tuple(_both(text, ours, theirs) for text in fitting)
        new_ms, old_ms = _timed(new, old)
    return Measured(counted, new_ms, old_ms)


def steps(ranks: Ranks, levels: int, width: int) -> int:
    """Steps that a text takes with a fixed shape.

    ranks: of each token among the draft's guesses, 0 for the first. levels: of the chain of first guesses. width:
    guesses at each level; those beside the chain have nothing below them.
    """
    place = taken = 0
    while place < len(ranks):
        level = 0
        while level < levels and place < len(ranks) and ranks[place] == 0:
            place, level = place + 1, level + 1
        if level < levels and place < len(ranks) and ranks[place] < width:
            place += 1
        place, taken = place + 1, taken + 1
    return taken


def _both(text: HeldOut, ours: TextReader, theirs: TextReader) -> TextCounts:
    tokens, first = text.tokens[: ours.length].tolist(), _first(text)
    return TextCounts(
        text.traffic_class,
        text.session,
        len(tokens) - first,
        _counts(tokens, first, ours),
        _counts(tokens, first, theirs),
    )


def _first(text: HeldOut) -> int:
    return max(text.first, UNPROMPTED)


def _counts(tokens: Sequence[int], first: int, reader: TextReader) -> Counts:
    ranks = _ranks(tokens, reader)[first - 1 :]
    return Counts(int((ranks == 0).sum()), steps(ranks, CHAIN, 1), steps(ranks, CHAIN, TREE))


def _ranks(tokens: Sequence[int], reader: TextReader) -> Ranks:
    """Rank of every token but the first among the draft's guesses, `TREE` for all that are not among the best so many.

    Of equal logits the lower id is the earlier guess.
    """
    found: list[Ranks] = []
    place = 1
    for logits in reader.read(tokens[:-1]):
        wanted = np.asarray(tokens[place : place + len(logits)])[:, None]
        scores = np.take_along_axis(logits, wanted, 1)
        equal_before = (logits == scores) & (np.arange(logits.shape[1]) < wanted)
        found.append(np.minimum(((logits > scores) | equal_before).sum(1), TREE).astype(np.int8))
        place += len(logits)
    return np.concatenate(found)


def _timed(new: LlamaModel, old: LlamaModel) -> tuple[float, float]:
    """Milliseconds for one token of each."""
    with _holding(new) as ours, _holding(old) as theirs:
        rounds: list[tuple[float, float]] = []
        until = time.monotonic() + _TIMED_S
        while len(rounds) < _ROUNDS and (len(rounds) < _LEAST_ROUNDS or time.monotonic() < until):
            rounds.append((measure_widths(ours, (1,))[1], measure_widths(theirs, (1,))[1]))
    ours_s, theirs_s = map(min, zip(*rounds, strict=True))
    return 1e3 * ours_s, 1e3 * theirs_s


def _holding(model: LlamaModel) -> TreeContext:
    """A context with some tokens, as in the midst of a text."""
    length = min(_HELD, model.n_ctx_train // 2)
    context = TreeContext(model, n_ctx=min(2 * _HELD, model.n_ctx_train), max_sequences=4)
    context.reset(list(itertools.islice(itertools.cycle(range(model.vocab_size)), length)))
    return context
