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
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from cloud_verifier.distill.data.plan import CARD, DatasetCard, DatasetPlan
from cloud_verifier.distill.data.selection import age, class_names, select, shingles
from cloud_verifier.distill.data.spans import cut, join_passages
from cloud_verifier.distill.data.texts import HELDOUT, TRAIN, VALIDATION, Text, save_texts
from cloud_verifier.distill.errors import StageFailed
from cloud_verifier.traffic.log import TrafficLog
from cloud_verifier.traffic.passage import Passage
from outrider.artifacts import atomic_files

Splits = Mapping[str, Sequence[Passage]]
"""The chosen pieces of the log, by `TRAIN`, `VALIDATION` and `HELDOUT`."""


def build(log: TrafficLog, folder: Path, plan: DatasetPlan, now: float) -> DatasetCard:
    """Write a dataset into `folder`, in place of one that is there.

    The log is read twice, so that the target's distributions are in memory only for what is chosen. Raises OSError, and
    StageFailed if the log holds nothing to learn from or to measure on.
    """
    lasting, expiring = _lasting(log, plan, now)
    weights_hash = plan.weights_hash or max(lasting, key=lambda one: one.time_unix).weights_hash
    ours = [passage for passage in lasting if passage.weights_hash == weights_hash]
    names = class_names(_sums((one.tenant, one.traffic_class, len(one)) for one in ours), plan.classes, plan.named)
    splits, left_out = _choose([_renamed(one, names) for one in ours], plan)
    left_out.update(expiring=expiring, other_target=sum(map(len, lasting)) - sum(map(len, ours)))
    whole = (
        _renamed(one, names)
        for one in log.read(plan.since_unix, now)
        if one.expires_unix > now + plan.lasts_s and one.weights_hash == weights_hash and one.traffic_class in names
    )
    filled = _filled(itertools.chain(*splits.values()), whole, plan.top)
    splits = {name: [piece for piece in pieces if piece in filled] for name, pieces in splits.items()}
    if not all(splits.values()):
        raise StageFailed("the traffic log lost passages while it was read: it is shrunk or expired too often")
    if folder.exists():
        shutil.rmtree(folder)
    numbers = {name: number for number, name in enumerate({piece.session_id: None for piece in filled})}
    for name, pieces in splits.items():
        save_texts(folder / name, [_text(piece, filled[piece], numbers[piece.session_id]) for piece in pieces])
    heldout, sessions = Counter[str](), {(piece.traffic_class, piece.session_id) for piece in splits[HELDOUT]}
    for piece in splits[HELDOUT]:
        heldout[piece.traffic_class] += len(piece)
    card = DatasetCard(
        expires_unix=min(piece.expires_unix for piece in itertools.chain(*splits.values())),
        weights_hash=weights_hash,
        train=_sums((one.traffic_class, age(one, plan.fresh_since_unix), len(one)) for one in splits[TRAIN]),
        heldout=heldout,
        heldout_sessions=Counter(name for name, _ in sessions),
        left_out=left_out,
    )
    atomic_files.write(folder / CARD, card.model_dump_json(indent=1).encode() + b"\n")  # last: it completes the dataset
    return card


def _lasting(log: TrafficLog, plan: DatasetPlan, now: float) -> tuple[list[Passage], int]:
    """Return the passages that last for a whole run, and the tokens of those that do not. Raises StageFailed."""
    passages = list(log.read(plan.since_unix, now, whole=False))
    if not passages:
        raise StageFailed("the traffic log holds no passage: is recording on for any tenant?")
    lasting = [one for one in passages if one.expires_unix > now + plan.lasts_s]
    if not lasting:
        raise StageFailed(
            f"all of the traffic log expires within {plan.lasts_s / 60:.0f} minutes, which a run may take: let tenants'"
            " recordings be kept for longer, or train for fewer minutes"
        )
    return lasting, sum(map(len, passages)) - sum(map(len, lasting))


def _choose(passages: Sequence[Passage], plan: DatasetPlan) -> tuple[Splits, Counter[str]]:
    """Return the pieces to use, and the tokens left out by reason. Raises StageFailed for an empty split."""
    pieces, left_out = _pieces(passages, plan)
    to_hold_out, to_validate, to_train = _split(pieces, plan)
    heldout, _ = select(to_hold_out, plan, plan.heldout_tokens, math.inf)
    validation, _ = select(to_validate, plan, plan.heldout_tokens, math.inf)
    unlike = _unlike(to_train, [*heldout, *validation], plan)
    left_out["held_out"] = sum(len(piece) for piece in to_train) - sum(len(piece) for piece in unlike)
    train, dropped = select(unlike, plan, plan.tokens, plan.fresh_since_unix)
    splits = {TRAIN: train, VALIDATION: validation, HELDOUT: heldout}
    if not all(splits.values()):
        raise StageFailed(
            f"the traffic log holds {len({one.session_id for one in passages})} sessions of this target, with"
            f" {len(train)} texts to learn from, {len(validation)} to validate and {len(heldout)} to measure on; all"
            " are needed"
        )
    return splits, left_out + dropped


def _pieces(passages: Iterable[Passage], plan: DatasetPlan) -> tuple[list[Passage], Counter[str]]:
    """Return the log's spans, cut to windows, and the tokens of those too short to learn from."""
    pieces, left_out = [], Counter[str]()
    for span in join_passages(passages):
        for piece in cut(span, plan.window, plan.overlap, plan.prompt):
            if len(piece) + 1 < plan.shortest:
                left_out["short"] += len(piece)
            else:
                pieces.append(piece)
    return pieces, left_out


def _split(pieces: Sequence[Passage], plan: DatasetPlan) -> tuple[list[Passage], list[Passage], list[Passage]]:
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


def _unlike(pieces: Iterable[Passage], measured: Iterable[Passage], plan: DatasetPlan) -> list[Passage]:
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


def _filled(pieces: Iterable[Passage], passages: Iterable[Passage], top: int) -> dict[Passage, Passage]:
    """Return the pieces with the distributions that the passages have, without those of which one is missing.

    top: K, the likeliest ids of a position that are kept.
    """
    parts: dict[str, list[tuple[Passage, list[Passage]]]] = defaultdict(list)
    for piece in pieces:
        parts[piece.session_id].append((piece, []))
    for passage in passages:
        for piece, overlapping in parts.get(passage.session_id, ()):
            if passage.start < piece.end and piece.start < passage.end:
                overlapping.append(_narrowed(passage, top))
    filled = {}
    for piece, overlapping in itertools.chain(*parts.values()):
        for span in join_passages(overlapping):
            if (span.tenant, span.traffic_class) == (piece.tenant, piece.traffic_class) and span.start <= piece.start:
                here = span.cut(piece.start - span.start, piece.end - span.start)
                if np.array_equal(here.tokens, piece.tokens):
                    filled[piece] = here
    return filled


def _narrowed(passage: Passage, top: int) -> Passage:
    """Return a passage with K = `top`: beyond that, probability goes to the tail; ids of -1 stand for missing ones."""
    missing = ((0, 0), (0, max(0, top - passage.top)))
    beyond = np.exp(passage.top_log_probs[:, top:]).sum(1)
    return dataclasses.replace(
        passage,
        top_ids=np.pad(passage.top_ids[:, :top], missing, constant_values=-1),
        top_log_probs=np.pad(passage.top_log_probs[:, :top], missing, constant_values=-np.inf),
        tail=np.clip(passage.tail + beyond, 0.0, 1.0),
    )


def _text(piece: Passage, filled: Passage, session: int) -> Text:
    """Return a piece as a text. Its context has no distributions."""
    context = len(piece.prompt)
    rows = (context, 0), (0, 0)
    return Text(
        piece.traffic_class,
        piece.tenant,
        np.concatenate([piece.prompt, piece.tokens]),
        np.pad(filled.top_ids, rows, constant_values=-1),
        np.pad(filled.top_log_probs, rows, constant_values=-np.inf),
        np.pad(filled.tail, rows[0]),
        context,
        session,
    )
