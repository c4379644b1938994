"""Measure drafts as devices run them: the quantized file, in llama.cpp, on texts that the target wrote.

Each draft reads the text, and its proposals at each position are compared with the token that is there. Under greedy
drafting this determines what would be accepted of any token tree of a fixed shape: only nodes on the text's own path
count, and they follow from the rank that the draft gave each token. Two shapes are counted:

    chain   6 nodes, each the draft's first choice after the one before
    tree    12 nodes, two wide: the chain, and beside each of its nodes the draft's second choice, which is a leaf

A step commits the accepted nodes and the target's next token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.distill.data.texts import Text
from outrider.llama import LlamaModel, TextContext, TreeContext, measure_widths

CHAIN = 6
"""Nodes of the chain, and levels of the tree."""
TREE = 2
"""Nodes at each level of the tree."""
CONTEXT = 1_024
"""Tokens of a text that are read at most."""
UNPROMPTED = 8
"""First tokens of a text that do not count, unless a prompt of as many tokens precedes its labels: without the prompt,
from which a draft would know, they cannot be predicted."""
_ROUNDS = 25
_MIN_ROUNDS = 3
_TIMED_S = 10.0
"""Seconds after which no further round of timing begins."""
_HELD = 128
"""Tokens in a draft's context while its decodes are timed."""

TokenRanks = NDArray[np.int8]


@dataclass(frozen=True)
class DraftCounts:
    """Counts what one draft predicts of one text."""

    accepted: int
    """Positions where the draft's first choice is the text's token."""
    chain_steps: int
    """Verification steps that the text takes with the chain."""
    tree_steps: int


@dataclass(frozen=True)
class TextComparison:
    """Compares what two drafts predict of one text."""

    traffic_class: str
    session: int
    """Texts of one session resemble one another, so they are one sample."""
    positions: int
    """Tokens that were predicted."""
    candidate: DraftCounts
    incumbent: DraftCounts


@dataclass(frozen=True)
class DraftComparison:
    """Compares two drafts on the same texts, and in speed."""

    texts: tuple[TextComparison, ...]
    candidate_ms: float
    """Milliseconds to decode one token after `_HELD` others: the minimum of alternating rounds, since whatever else
    runs on the machine only adds to it."""
    incumbent_ms: float


def compare(candidate: Path, incumbent: Path, texts: Iterable[Text], threads: int = 1) -> DraftComparison:
    """Measure two GGUF files on the same texts.

    Leaves out texts that are too short to count, or that hold ids unknown to a draft. Raises ModelRefused.
    """
    with LlamaModel.load(candidate, threads=threads) as new, LlamaModel.load(incumbent, threads=threads) as old:
        length, ids = min(CONTEXT, new.n_ctx_train, old.n_ctx_train), min(new.vocab_size, old.vocab_size)
        compared = []
        with (
            TextContext(new, length=length, threads=threads) as new_reader,
            TextContext(old, length=length, threads=threads) as old_reader,
        ):
            for text in texts:
                tokens, first = text.tokens[:length].tolist(), max(text.first, UNPROMPTED)
                if first < len(tokens) and int(text.tokens.max()) < ids:
                    counts = _counts(tokens, first, new_reader), _counts(tokens, first, old_reader)
                    compared.append(TextComparison(text.traffic_class, text.session, len(tokens) - first, *counts))
        return DraftComparison(tuple(compared), *_decode_ms(new, old))


def steps(ranks: TokenRanks, levels: int, width: int) -> int:
    """Return the number of verification steps that a text takes with a fixed shape.

    ranks: of each token among the draft's choices, 0 for the first, `[n]`; or `[levels, n]`, if it depends on the level
    at which it is proposed. levels: of the chain of first choices. width: nodes at each level, of which only the first
    has children.
    """
    count = ranks.shape[-1]
    by_level = np.broadcast_to(ranks, (levels, count))
    position = taken = 0
    while position < count:
        level = 0
        while level < levels and position < count and by_level[level, position] == 0:
            position, level = position + 1, level + 1
        if level < levels and position < count and by_level[level, position] < width:
            position += 1
        position, taken = position + 1, taken + 1
    return taken


def _counts(tokens: Sequence[int], first: int, reader: TextContext) -> DraftCounts:
    """Count what a draft predicts of the tokens from `first` on; of equal logits the lower id is its earlier choice."""
    found: list[TokenRanks] = []
    position = 1
    for logits in reader.read(tokens[:-1]):
        actual = np.asarray(tokens[position : position + len(logits)])[:, None]
        scores = np.take_along_axis(logits, actual, 1)
        equal_before = (logits == scores) & (np.arange(logits.shape[1]) < actual)
        found.append(np.minimum(((logits > scores) | equal_before).sum(1), TREE).astype(np.int8))
        position += len(logits)
    ranks = np.concatenate(found)[first - 1 :]
    return DraftCounts(int((ranks == 0).sum()), steps(ranks, CHAIN, 1), steps(ranks, CHAIN, TREE))


def _decode_ms(new: LlamaModel, old: LlamaModel) -> tuple[float, float]:
    """Return the milliseconds in which each model decodes one token."""
    with _filled_context(new) as new_context, _filled_context(old) as old_context:
        rounds: list[tuple[float, float]] = []
        deadline = time.monotonic() + _TIMED_S
        while len(rounds) < _ROUNDS and (len(rounds) < _MIN_ROUNDS or time.monotonic() < deadline):
            rounds.append((measure_widths(new_context, (1,))[1], measure_widths(old_context, (1,))[1]))
    new_s, old_s = map(min, zip(*rounds, strict=True))
    return 1e3 * new_s, 1e3 * old_s


def _filled_context(model: LlamaModel) -> TreeContext:
    """Return a context that holds some tokens, as in the middle of a text."""
    length = min(_HELD, model.n_ctx_train // 2)
    context = TreeContext(model, n_ctx=min(2 * _HELD, model.n_ctx_train), max_sequences=4)
    context.reset(list(itertools.islice(itertools.cycle(range(model.vocab_size)), length)))
    return context
