"""Measure drafts as they will run, the quantized file or the file of heads, on texts that the target wrote.

Each draft reads the text, and its proposals at each position are compared with the token that is there. Under greedy
drafting this determines what would be accepted of any token tree of a fixed shape: only nodes on the text's own path
count, and they follow from the rank that the draft gave each token. Two shapes are counted:

    chain   6 nodes, each the draft's first choice after the one before
    tree    12 nodes, two wide: the chain, and beside each of its nodes the draft's second choice, which is a leaf

A step commits the accepted nodes and the target's next token. Unlike a draft's, a prediction of heads depends on how
far ahead it is, so that each level has ranks of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.distill.texts import Text
from outrider.llama import LlamaModel, TextContext, TreeContext, measure_widths

if TYPE_CHECKING:
    from cloud_verifier.distill.training.heads_student import HeadsStudent

CHAIN = 6
"""Nodes of the chain, and levels of the tree."""
TREE = 2
"""Nodes at each level of the tree."""
CONTEXT = 1_024
"""Tokens of a text that are read at most."""
UNPROMPTED = 8
"""First tokens of a text that do not count, unless a prompt of as many tokens precedes its labels: without the prompt,
from which a draft would know, they cannot be predicted."""
_ROUNDS = 15
_HELD = 128
"""Tokens in a draft's context while its decodes are timed."""

TokenRanks = NDArray[np.int8]
"""`[levels, n]` or, if alike on all levels, `[1, n]`: each token's rank among the draft's choices, 0 for the first, at
most `TREE`."""


@dataclass(frozen=True)
class DraftComparison:
    """Compares what two drafts predict of the same n texts, and their speed."""

    classes: Sequence[str]
    """The traffic class of each text."""
    sessions: NDArray[np.int64]
    """`[n]`: texts of one session resemble one another, so they are one sample."""
    positions: NDArray[np.int64]
    """`[n]`: tokens of each text that were predicted."""
    candidate: NDArray[np.int64]
    """`[n, 3]`: positions where the draft's first choice is the text's token, and the verification steps that the text
    takes with the chain, and with the tree."""
    incumbent: NDArray[np.int64]
    candidate_ms: float = 0.0
    """Milliseconds to decode one token after `_HELD` others: the minimum of alternating rounds, since whatever else
    runs on the machine only adds to it. Heads, whose time their target's outweighs, have 0."""
    incumbent_ms: float = 0.0


def compare(candidate: Path, incumbent: Path, texts: Iterable[Text], threads: int = 1) -> DraftComparison:
    """Measure two GGUF files on the same texts.

    Leaves out texts that are too short to count, or that hold ids unknown to a draft. Raises ModelRefused.
    """
    with LlamaModel.load(candidate, threads=threads) as new, LlamaModel.load(incumbent, threads=threads) as old:
        length, ids = min(CONTEXT, new.n_ctx_train, old.n_ctx_train), min(new.vocab_size, old.vocab_size)
        with (
            TextContext(new, length=length, threads=threads) as new_reader,
            TextContext(old, length=length, threads=threads) as old_reader,
        ):
            known = (text for text in texts if int(text.tokens.max()) < ids)
            compared = _compared(known, length, _ranks_by(new_reader), _ranks_by(old_reader))
        new_ms, old_ms = _decode_ms(new, old)
        return replace(compared, candidate_ms=new_ms, incumbent_ms=old_ms)


def compare_heads(candidate: Path, incumbent: Path | None, target: Path, texts: Iterable[Text]) -> DraftComparison:
    """Measure two files of heads on the same texts. incumbent: None if no heads are served yet: then the candidate is
    compared with plain steps of one token.

    target: the folder of their target. Raises ModelRefused for heads of another one, and for damaged files.
    """
    from cloud_verifier.distill.training.heads_student import HeadsStudent, load_target
    from cloud_verifier.engine.server_draft.head_models import load_heads

    module, identity = load_target(target)

    def ranks_of(file: Path) -> Callable[[Text, int], TokenRanks]:
        student = HeadsStudent(module, load_heads(file, identity), identity).eval()
        return lambda text, length: _ranks_of_heads(student, text, length)

    def plain(text: Text, length: int) -> TokenRanks:
        return np.full((1, min(length, len(text.tokens)) - 1), TREE, np.int8)

    return _compared(texts, CONTEXT, ranks_of(candidate), ranks_of(incumbent) if incumbent else plain)


def _compared(
    texts: Iterable[Text],
    length: int,
    new: Callable[[Text, int], TokenRanks],
    old: Callable[[Text, int], TokenRanks],
) -> DraftComparison:
    """Compare the ranks that two drafts give to each text's tokens after the first, of which `length` are read."""
    classes, numbers, counts = [], [], []
    for text in texts:
        first, end = max(text.first, UNPROMPTED), min(length, len(text.tokens))
        if first < end:
            classes.append(text.traffic_class)
            numbers.append((text.session, end - first))
            counts.append([_counts(ranks(text, length)[:, first - 1 :]) for ranks in (new, old)])
    sessions, positions = np.array(numbers, np.int64).reshape(-1, 2).T
    candidate, incumbent = np.array(counts, np.int64).reshape(-1, 2, 3).swapaxes(0, 1)
    return DraftComparison(classes, sessions, positions, candidate, incumbent)


def _counts(ranks: TokenRanks) -> tuple[int, int, int]:
    return int((ranks[0] == 0).sum()), steps(ranks, 1), steps(ranks, TREE)


def steps(ranks: TokenRanks, width: int) -> int:
    """Return the verification steps that a text takes. width: nodes at each of CHAIN levels; only the first of them has
    children."""
    count = ranks.shape[-1]
    by_level = np.broadcast_to(ranks, (CHAIN, count))
    position = taken = 0
    while position < count:
        level = 0
        while level < CHAIN and position < count and by_level[level, position] == 0:
            position, level = position + 1, level + 1
        if level < CHAIN and position < count and by_level[level, position] < width:
            position += 1
        position, taken = position + 1, taken + 1
    return taken


def ranks_among(logits: NDArray[np.float32], actual: NDArray[np.int32]) -> TokenRanks:
    """Return each token's rank `[n]` among the choices by its logits `[n, V]`; of equal ones the lower id is first."""
    scores = np.take_along_axis(logits, actual[:, None], 1)
    before = (logits == scores) & (np.arange(logits.shape[1]) < actual[:, None])
    ranks: TokenRanks = np.minimum(((logits > scores) | before).sum(1), TREE).astype(np.int8)
    return ranks


def _ranks_by(reader: TextContext) -> Callable[[Text, int], TokenRanks]:
    def ranks(text: Text, length: int) -> TokenRanks:
        tokens, found = text.tokens[:length], []
        position = 1
        for logits in reader.read(tokens[:-1].tolist()):
            found.append(ranks_among(logits, tokens[position : position + len(logits)]))
            position += len(logits)
        return np.concatenate(found)[None]

    return ranks


def _ranks_of_heads(student: HeadsStudent, text: Text, length: int) -> TokenRanks:
    """Return the ranks that heads give to each token after the first, with the target's states from the labels on.

    Columns that nothing predicts count as wrong.
    """
    import torch

    with torch.no_grad():
        tokens, begun = text.tokens[:length], text.first - 1
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        labels = torch.full_like(ids, -1)
        labels[0, begun:] = 1
        states = student.read(ids, labels)[:, begun:]
        ids, labels = ids[:, begun:], labels[:, begun:]
        count = ids.shape[1]
        ranks = np.full((CHAIN, len(tokens)), TREE, np.int8)
        for level, (predicted, offset, behind) in enumerate(student.predictions(states, ids, labels, CHAIN)[:CHAIN]):
            known = predicted[0, behind : count - offset - 1]
            if len(known):
                at = begun + behind + offset + 1
                ranks[level, at:] = ranks_among(student.logits(known).numpy(), tokens[at:])
    return ranks[:, 1:]


def _decode_ms(new: LlamaModel, old: LlamaModel) -> tuple[float, float]:
    """Return the milliseconds in which each model decodes one token."""
    with _filled_context(new) as one, _filled_context(old) as other:
        rounds = [(measure_widths(one, (1,))[1], measure_widths(other, (1,))[1]) for _ in range(_ROUNDS)]
    new_s, old_s = map(min, zip(*rounds, strict=True))
    return 1e3 * new_s, 1e3 * old_s


def _filled_context(model: LlamaModel) -> Any:
    """Return a context that holds some tokens, as in the middle of a text."""
    length = min(_HELD, model.n_ctx_train // 2)
    context = TreeContext(model, n_ctx=min(2 * _HELD, model.n_ctx_train), max_sequences=4)
    context.reset(list(itertools.islice(itertools.cycle(range(model.vocab_size)), length)))
    return context
