"""Build the dataset of one training from the traffic log: training, validation and held-out texts.

    card = build(TrafficLog(url), folder, DatasetPlan(), now=time.time())

writes `train/*.safetensors`, `validation/*.safetensors`, `heldout/*.safetensors` and, last, `card.json`. Validation
text chooses the best checkpoint of a training; held-out text is the gate's alone. A hash of its id decides whether a
session is held out, so no later dataset trains on what an earlier one was measured on, unless `heldout_share` was
made smaller in between.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.distill.data.plan import CARD, DatasetCard, DatasetPlan
from cloud_verifier.distill.data.selection import age, class_names, select, shingles
from cloud_verifier.distill.data.spans import TextSpan, cut, join_passages
from cloud_verifier.distill.data.texts import HELDOUT, TRAIN, VALIDATION, Text, save_texts
from cloud_verifier.distill.errors import PermanentFailure
from cloud_verifier.traffic.log import TrafficLog
from cloud_verifier.traffic.passage import Passage
from outrider.artifacts import atomic_files

Splits = Mapping[str, Sequence[TextSpan]]
"""The chosen pieces of the log, by `TRAIN`, `VALIDATION` and `HELDOUT`."""


def build(log: TrafficLog, folder: Path, plan: DatasetPlan, now: float) -> DatasetCard:
    """Write a dataset into `folder`, in place of one that is there.

    The log is read twice, so that the target's distributions are in memory only for what is chosen. Raises OSError, and
    PermanentFailure if the log holds nothing to learn from or to measure on.
    """
    lasting, expiring = _lasting(log, plan, now)
    newest = max(lasting, key=lambda one: one.time_unix)
    weights_hash = plan.weights_hash or newest.weights_hash
    ours = [passage for passage in lasting if passage.weights_hash == weights_hash]
    names = class_names(_sums((one.tenant, one.traffic_class, len(one)) for one in ours), plan.classes, plan.named)
    splits, left_out = _choose([_renamed(one, names) for one in ours], plan)
    backfill = _LogitBackfill(itertools.chain(*splits.values()), plan.top)
    for passage in log.read(plan.since_unix, now):
        lasts = passage.expires_unix > now + plan.lasts_s
        if lasts and passage.weights_hash == weights_hash and passage.traffic_class in names:  # else it came since
            backfill.add(_renamed(passage, names))
    splits = {name: [piece for piece in pieces if backfill.covers(piece)] for name, pieces in splits.items()}
    if not all(splits.values()):
        raise PermanentFailure("the traffic log lost passages while it was read: it is shrunk or expired too often")
    left_out.update(expiring=expiring, other_target=sum(map(len, lasting)) - sum(map(len, ours)))
    facts = {"built_unix": now, "weights_hash": weights_hash, "newest_unix": newest.time_unix, "left_out": left_out}
    card = _card(splits, plan, facts)
    if folder.exists():
        shutil.rmtree(folder)
    for name, pieces in splits.items():
        save_texts(folder / name, [backfill.text(piece) for piece in pieces])
    atomic_files.write(folder / CARD, card.model_dump_json(indent=1).encode() + b"\n")  # last: it completes the dataset
    return card


def _card(splits: Splits, plan: DatasetPlan, facts: Mapping[str, Any]) -> DatasetCard:
    """Return the card of a dataset. facts: the fields that the splits do not give."""
    train, heldout = splits[TRAIN], Counter[str]()
    for piece in splits[HELDOUT]:
        heldout[piece.traffic_class] += piece.label_count
    heldout_sessions = {(piece.traffic_class, piece.session_id) for piece in splits[HELDOUT]}
    return DatasetCard(
        expires_unix=min(piece.expires_unix for piece in itertools.chain(*splits.values())),
        train=_sums((one.traffic_class, age(one, plan.fresh_since_unix), one.label_count) for one in train),
        heldout=heldout,
        heldout_sessions=Counter(name for name, _ in heldout_sessions),
        tenants=_sums((one.traffic_class, one.tenant, one.label_count) for one in train),
        texts=len(train),
        plan=plan,
        **facts,
    )


def _lasting(log: TrafficLog, plan: DatasetPlan, now: float) -> tuple[list[Passage], int]:
    """Return the passages that last for a whole run, and the tokens of those that do not. Raises PermanentFailure."""
    passages = list(log.read(plan.since_unix, now, whole=False))
    if not passages:
        raise PermanentFailure("the traffic log holds no passage: is recording on for any tenant?")
    lasting = [one for one in passages if one.expires_unix > now + plan.lasts_s]
    if not lasting:
        raise PermanentFailure(
            f"all of the traffic log expires within {plan.lasts_s / 60:.0f} minutes, which a run may take: let tenants'"
            " recordings be kept for longer, or lower train_minutes and stage_minutes"
        )
    return lasting, sum(map(len, passages)) - sum(map(len, lasting))


def _choose(passages: Sequence[Passage], plan: DatasetPlan) -> tuple[Splits, Counter[str]]:
    """Return the pieces to use, and the tokens left out by reason. Raises PermanentFailure for an empty split."""
    pieces, left_out = _pieces(passages, plan)
    to_hold_out, to_validate, to_train = _split(pieces, plan)
    heldout, _ = select(to_hold_out, plan, plan.heldout_tokens, by_class=True)
    validation, _ = select(to_validate, plan, plan.heldout_tokens, by_class=True)
    unlike = _unlike(to_train, [*heldout, *validation], plan)
    left_out["held_out"] = sum(piece.label_count for piece in to_train) - sum(piece.label_count for piece in unlike)
    train, dropped = select(unlike, plan, plan.tokens, by_class=False)
    splits = {TRAIN: train, VALIDATION: validation, HELDOUT: heldout}
    if not all(splits.values()):
        raise PermanentFailure(
            f"the traffic log holds {len({one.session_id for one in passages})} sessions of this target, with"
            f" {len(train)} texts to learn from, {len(validation)} to validate and {len(heldout)} to measure on; all"
            " are needed"
        )
    return splits, left_out + dropped


def _pieces(passages: Iterable[Passage], plan: DatasetPlan) -> tuple[list[TextSpan], Counter[str]]:
    """Return the log's spans, cut to windows, and the tokens of those too short to learn from."""
    pieces, left_out = [], Counter[str]()
    for span in join_passages(passages):
        for piece in cut(span, plan.window, plan.overlap, plan.prompt):
            if piece.label_count + 1 < plan.shortest:
                left_out["short"] += piece.label_count
            else:
                pieces.append(piece)
    return pieces, left_out


def _split(pieces: Sequence[TextSpan], plan: DatasetPlan) -> tuple[list[TextSpan], list[TextSpan], list[TextSpan]]:
    """Divide pieces into those to hold out, to validate on and to train on, by session."""
    lots = {piece.session_id: session_lot(piece.session_id) for piece in pieces}
    to_hold_out = [piece for piece in pieces if lots[piece.session_id] < plan.heldout_share]
    rest = [piece for piece in pieces if lots[piece.session_id] >= plan.heldout_share]
    bound = max(plan.heldout_share + plan.validation_share, min((lots[one.session_id] for one in rest), default=0.0))
    to_validate = [one for one in rest if lots[one.session_id] <= bound]
    return to_hold_out, to_validate, [one for one in rest if lots[one.session_id] > bound]


def session_lot(session_id: str) -> float:
    """Return a number in [0, 1) drawn for a session, without a seed: what is held out must never change."""
    digest = hashlib.blake2b(session_id.encode(), digest_size=8, person=b"heldout").digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _unlike(pieces: Iterable[TextSpan], measured: Iterable[TextSpan], plan: DatasetPlan) -> list[TextSpan]:
    """Leave out pieces nearly equal to measured ones, which a draft could learn by heart."""
    known: set[int] = set()
    for piece in measured:
        known.update(shingles(piece.tokens).tolist())
    kept = []
    for piece in pieces:
        hashes = shingles(piece.tokens).tolist()
        if sum(one in known for one in hashes) < plan.repeated_share * len(hashes):
            kept.append(piece)
    return kept


def _renamed(passage: Passage, names: dict[str, str]) -> Passage:
    """Return a passage under the name that its class has in the dataset."""
    return dataclasses.replace(passage, traffic_class=names[passage.traffic_class])


def _sums(rows: Iterable[tuple[str, str, int]]) -> dict[str, dict[str, int]]:
    """Return the sums of the amounts in (outer key, inner key, amount), by both keys."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for outer, inner, amount in rows:
        sums[outer][inner] += amount
    return {outer: dict(inner) for outer, inner in sums.items()}


class _LogitBackfill:
    """The texts of the chosen spans, whose distributions are filled in from passages in any order."""

    def __init__(self, spans: Iterable[TextSpan], top: int) -> None:
        """Keep K = `top` likeliest ids of a position; the probability of others goes to the tail."""
        self._top = top
        self._texts: dict[TextSpan, tuple[Text, NDArray[np.bool_]]] = {}
        """The text of each span, and which of the span's tokens have their distribution, `[n]`."""
        self._by_session: dict[tuple[str, str, str], list[TextSpan]] = defaultdict(list)
        numbers: dict[str, int] = {}
        for span in spans:
            text = _empty_text(span, top, numbers.setdefault(span.session_id, len(numbers)))
            self._texts[span] = text, np.zeros(len(span.tokens), bool)
            self._by_session[span.session_id, span.tenant, span.traffic_class].append(span)

    def add(self, passage: Passage) -> None:
        """Copy the distributions of all positions that the passage shares with any span."""
        for span in self._by_session.get((passage.session_id, passage.tenant, passage.traffic_class), ()):
            begin, end = max(span.start, passage.start), min(span.end, passage.end)
            here = slice(begin - span.start, end - span.start)
            there = slice(begin - passage.start, end - passage.start)
            if begin >= end or not np.array_equal(span.tokens[here], passage.tokens[there]):
                continue  # they share no positions, or another verifier recorded other tokens there
            text, known = self._texts[span]
            rows = slice(here.start + len(span.prompt), here.stop + len(span.prompt))
            top = min(self._top, passage.top)
            text.top_ids[rows, :top] = passage.top_ids[there, :top]
            text.top_log_probs[rows, :top] = passage.top_log_probs[there, :top]
            beyond = np.exp(passage.top_log_probs[there, top:]).sum(1)
            text.tail[rows] = np.clip(passage.tail[there] + beyond, 0.0, 1.0)
            known[here] = True

    def covers(self, span: TextSpan) -> bool:
        """Return whether all labels of a span have their distribution."""
        _, known = self._texts[span]
        return bool(known[span.first :].all())

    def text(self, span: TextSpan) -> Text:
        """Return the text of a span that is covered."""
        return self._texts[span][0]


def _empty_text(span: TextSpan, top: int, session: int) -> Text:
    """Return a span with its prompt as a text without distributions."""
    tokens = np.concatenate([span.prompt, span.tokens])
    return Text(
        span.traffic_class,
        span.tenant,
        tokens,
        np.full((len(tokens), top), -1, np.int32),
        np.full((len(tokens), top), -np.inf, np.float32),
        np.zeros(len(tokens), np.float32),
        len(span.prompt) + span.first,
        session,
    )
