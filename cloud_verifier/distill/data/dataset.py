"""Builds the dataset of one training from the traffic log: what a draft learns from, and what it is measured on.

    card = build(SegmentLog(url), folder, DatasetPlan(), now=time.time())

writes `train/*.safetensors`, `watched/*.safetensors`, `heldout/*.safetensors` and, last, `card.json`. What is watched
says which of a training's checkpoints is the best; what is held out is the gate's alone. A session is either learnt
from or held out, by a hash of its id: no later dataset trains on what an earlier one was measured on, unless
`heldout_share` was made smaller in between.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cloud_verifier.distill.data.logit_backfill import Filling
from cloud_verifier.distill.data.selection import Limits, age, class_names, select, shingles
from cloud_verifier.distill.data.spans import Outline, Source, Stretch, cut, stretches
from cloud_verifier.distill.data.texts import Text, load_texts, save_texts
from outrider.artifacts import atomic_files

CARD = "card.json"


class DatasetEmpty(ValueError):
    """The log holds nothing to learn from, or nothing to measure on; says what it does hold."""


class DatasetPlan(BaseModel):
    """How a dataset is made. Tokens are those that are learnt from or measured on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights_hash: str = ""
    """The target whose text is taken; the one of the newest passage where empty."""
    since_unix: float = 0.0
    """Passages older than this are not read."""
    fresh_since_unix: float = 0.0
    """When old traffic ends and fresh begins: usually the time of the last training's dataset."""
    lasts_s: float = Field(default=0.0, ge=0)
    """Passages that expire sooner than so many seconds after `now` are left out, so that the dataset lasts as long."""
    tokens: int = Field(default=400_000, ge=1)
    heldout_tokens: int = Field(default=40_000, ge=1)
    heldout_share: float = Field(default=0.1, gt=0, lt=1)
    """Part of the sessions that the gate measures on; never learnt from."""
    watched_share: float = Field(default=0.04, gt=0, lt=0.5)
    """Part of the sessions that training is measured on; at least one."""
    replay_share: float = Field(default=0.3, ge=0, lt=1)
    """Part of the tokens learnt that is old traffic, so that a new domain does not displace the ones before it. Of what
    is held out every class has its share, however old: what is not measured may be unlearnt unseen."""
    class_shares: dict[str, float] = Field(default_factory=dict)
    """Weights of the traffic classes, above 0; those not named weigh 1."""
    tenant_share: float = Field(default=0.5, gt=0, le=1)
    """No tenant gives more than this part of a class, or of all, unless it is alone, and but for `tenant_tokens`."""
    tenant_tokens: int = Field(default=20_000, ge=0)
    """Of `tokens`; of what is held out as many less."""
    classes: int = Field(default=32, ge=1)
    """Classes that are told apart, the largest; a class is whatever a client says. The others are one."""
    named: tuple[str, ...] = ()
    """Classes that are told apart in any case."""
    copies: int = Field(default=3, ge=1)
    """Texts nearly alike that are taken: the same request a thousand times is one lesson."""
    repeated_share: float = Field(default=0.8, gt=0, le=1)
    """A text is nearly like others if this part of its pieces of 8 tokens is in them."""
    top: int = Field(default=64, ge=1)
    """The target's likeliest ids that are kept of each position."""
    window: int = Field(default=512, ge=8)
    """Tokens of the longest text; a longer stretch of a session becomes several."""
    overlap: int = Field(default=64, ge=1)
    """Tokens of context at the head of a text that goes on from another."""
    prompt: int = Field(default=256, ge=0)
    """Tokens of its prompt at the head of a session's first text, where the log has them, and at most half a window.
    They are read and never learnt from, so each costs a training time and nothing else."""
    shortest: int = Field(default=8, ge=2)
    """Tokens of the shortest text."""
    seed: int = 0

    def limits(self, tokens: int, *, by_class: bool) -> Limits:
        ours = ("tokens", "by_class", "tenant_tokens")
        floor = self.tenant_tokens * tokens // self.tokens
        shared = {name: getattr(self, name) for name in Limits.__dataclass_fields__ if name not in ours}
        return Limits(tokens=tokens, by_class=by_class, tenant_tokens=floor, **shared)


class DatasetCard(BaseModel):
    """What a dataset holds. Counts are of tokens that are learnt from or measured on."""

    model_config = ConfigDict(frozen=True)

    built_unix: float
    expires_unix: float
    """When the first of its passages must be forgotten, and the dataset with it."""
    weights_hash: str
    newest_unix: float
    """Of the newest passage read: where the next dataset's fresh traffic may begin."""
    train: dict[str, dict[str, int]]
    """Class -> age (`fresh` or `old`) -> tokens."""
    heldout: dict[str, int]
    """Class -> tokens."""
    heldout_sessions: dict[str, int]
    """Class -> sessions."""
    tenants: dict[str, dict[str, int]]
    """Class -> tenant -> tokens that are learnt from."""
    left_out: dict[str, int]
    """Reason -> tokens: `duplicates`, `over_cap` (of a tenant), `over_budget`, `short`, `other_target`, `expiring`,
    `held_out` (nearly the same is)."""
    texts: int
    plan: DatasetPlan

    @property
    def train_tokens(self) -> int:
        return sum(sum(ages.values()) for ages in self.train.values())


def build(log: Source, folder: Path, plan: DatasetPlan, now: float) -> DatasetCard:
    """Write a dataset into `folder`, in place of one that is there. Raises DatasetEmpty.

    Reads the log twice, so that the target's distributions are held only of what is chosen.
    """
    outlines, expiring = _lasting(log, plan, now)
    newest = max(outlines, key=lambda one: one.time_unix)
    weights_hash = plan.weights_hash or newest.weights_hash
    ours = [outline for outline in outlines if outline.weights_hash == weights_hash]
    named = _class_names(ours, plan)
    chosen = _choose([dataclasses.replace(one, traffic_class=named[one.traffic_class]) for one in ours], plan)
    filling = Filling([*chosen.learnt, *chosen.watched, *chosen.measured], plan.top)
    for passage in log.read(plan.since_unix, now):
        lasts = passage.expires_unix > now + plan.lasts_s
        if lasts and passage.weights_hash == weights_hash and passage.traffic_class in named:  # else it has come since
            filling.take(dataclasses.replace(passage, traffic_class=named[passage.traffic_class]))
    chosen = chosen.that(filling.covers)  # the log may have lost passages since the choice
    if not chosen.enough:
        raise DatasetEmpty("the traffic log lost what was chosen while it was read: it is shrunk or expired too often")
    card = _card(
        chosen,
        plan,
        built_unix=now,
        weights_hash=weights_hash,
        newest_unix=newest.time_unix,
        left_out=dict(
            chosen.left_out + Counter(expiring=expiring, other_target=_tokens(outlines) - _tokens(ours)),
        ),
    )
    _write(folder, chosen, filling, card)
    return card


def heldout(folder: Path) -> list[Text]:
    """What the gate measures a dataset's drafts on."""
    return load_texts(folder / "heldout")


def watched(folder: Path) -> list[Text]:
    """What training is measured on."""
    return load_texts(folder / "watched")


def train(folder: Path) -> list[Text]:
    """What a dataset's drafts learn from."""
    return load_texts(folder / "train")


def read_card(folder: Path) -> DatasetCard:
    """Raises OSError for a folder without a card: its dataset was never finished."""
    return DatasetCard.model_validate_json((folder / CARD).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class _Chosen:
    """Pieces of the log, by what becomes of them."""

    learnt: Sequence[Stretch]
    watched: Sequence[Stretch]
    measured: Sequence[Stretch]
    left_out: Counter[str]
    """Reason -> tokens."""

    @property
    def enough(self) -> bool:
        return bool(self.learnt and self.watched and self.measured)

    def that(self, covered: Callable[[Stretch], bool]) -> _Chosen:
        """Those alone that are."""
        learnt, watched, measured = (
            [piece for piece in pieces if covered(piece)] for pieces in (self.learnt, self.watched, self.measured)
        )
        return _Chosen(learnt, watched, measured, self.left_out)


def _lasting(log: Source, plan: DatasetPlan, now: float) -> tuple[list[Outline], int]:
    """What can be used for as long as a run takes, and the tokens of what expires before. Raises DatasetEmpty."""
    outlines = [Outline.of(passage) for passage in log.read(plan.since_unix, now)]
    if not outlines:
        raise DatasetEmpty("the traffic log holds no passage: is recording on for any tenant?")
    lasting = [one for one in outlines if one.expires_unix > now + plan.lasts_s]
    if not lasting:
        raise DatasetEmpty(
            f"all of the traffic log expires within {plan.lasts_s / 60:.0f} minutes, which a run may take: let tenants'"
            " recordings be kept for longer, or lower train_minutes and stage_minutes"
        )
    return lasting, _tokens(outlines) - _tokens(lasting)


def _choose(outlines: Sequence[Outline], plan: DatasetPlan) -> _Chosen:
    """Raises DatasetEmpty where nothing is left to learn from, to watch or to measure on."""
    pieces, left_out = _pieces(outlines, plan)
    held_out, to_watch, to_learn = _split(pieces, plan)
    measured, _ = select(held_out, plan.limits(plan.heldout_tokens, by_class=True))
    watched, _ = select(to_watch, plan.limits(plan.heldout_tokens, by_class=True))
    unlike = _unlike(to_learn, [*measured, *watched], plan)
    left_out["held_out"] = sum(piece.learnt for piece in to_learn) - sum(piece.learnt for piece in unlike)
    learnt, dropped = select(unlike, plan.limits(plan.tokens, by_class=False))
    chosen = _Chosen(learnt, watched, measured, left_out + dropped)
    if not chosen.enough:
        raise DatasetEmpty(
            f"the traffic log holds {len({one.session_id for one in outlines})} sessions of this target, with"
            f" {len(learnt)} texts to learn from, {len(watched)} to watch and {len(measured)} to measure on; all are"
            " needed"
        )
    return chosen


def _card(chosen: _Chosen, plan: DatasetPlan, **of_log: Any) -> DatasetCard:
    learnt, measured = chosen.learnt, chosen.measured
    return DatasetCard(
        expires_unix=min(piece.expires_unix for piece in (*learnt, *chosen.watched, *measured)),
        train=_counts((piece.traffic_class, age(piece, plan.fresh_since_unix), piece.learnt) for piece in learnt),
        heldout=dict(_sums((piece.traffic_class, piece.learnt) for piece in measured)),
        heldout_sessions=dict(
            Counter(name for name, _ in {(piece.traffic_class, piece.session_id) for piece in measured})
        ),
        tenants=_counts((piece.traffic_class, piece.tenant, piece.learnt) for piece in learnt),
        texts=len(learnt),
        plan=plan,
        **of_log,
    )


def _write(folder: Path, chosen: _Chosen, filling: Filling, card: DatasetCard) -> None:
    """The card comes last: without it there is no dataset."""
    if folder.exists():
        shutil.rmtree(folder)
    for name, pieces in (("train", chosen.learnt), ("watched", chosen.watched), ("heldout", chosen.measured)):
        save_texts(folder / name, [filling.text(piece) for piece in pieces])
    atomic_files.write(folder / CARD, card.model_dump_json(indent=1).encode() + b"\n")


def _tokens(outlines: Iterable[Outline]) -> int:
    return sum(len(one.tokens) for one in outlines)


def _class_names(outlines: Iterable[Outline], plan: DatasetPlan) -> dict[str, str]:
    return class_names(
        _counts((one.tenant, one.traffic_class, len(one.tokens)) for one in outlines), plan.classes, plan.named
    )


def _pieces(outlines: Iterable[Outline], plan: DatasetPlan) -> tuple[list[Stretch], Counter[str]]:
    """The log's stretches, in pieces of a window; those too short to learn from are counted."""
    pieces, left_out = [], Counter[str]()
    for stretch in stretches(outlines):
        for piece in cut(stretch, plan.window, plan.overlap, plan.prompt):
            if piece.learnt + 1 < plan.shortest:
                left_out["short"] += piece.learnt
            else:
                pieces.append(piece)
    return pieces, left_out


def _lot(piece: Stretch) -> float:
    """Of the piece's session, in [0, 1)."""
    # No seed: which sessions are held out must never change.
    digest = hashlib.blake2b(piece.session_id.encode(), digest_size=8, person=b"heldout").digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _split(pieces: Sequence[Stretch], plan: DatasetPlan) -> tuple[list[Stretch], list[Stretch], list[Stretch]]:
    """What is held out, what is watched, and what is learnt from."""
    held_out = [piece for piece in pieces if _lot(piece) < plan.heldout_share]
    rest = [piece for piece in pieces if _lot(piece) >= plan.heldout_share]
    bound = max(plan.heldout_share + plan.watched_share, min(map(_lot, rest), default=0.0))
    return held_out, [one for one in rest if _lot(one) <= bound], [one for one in rest if _lot(one) > bound]


def _unlike(pieces: Iterable[Stretch], measured: Iterable[Stretch], plan: DatasetPlan) -> list[Stretch]:
    """Leave out what is nearly the same as what is measured on: by it a draft that learnt by heart looks good."""
    known: set[int] = set()
    for piece in measured:
        known.update(shingles(piece.tokens).tolist())
    kept = []
    for piece in pieces:
        hashes = shingles(piece.tokens).tolist()
        if sum(one in known for one in hashes) < plan.repeated_share * len(hashes):
            kept.append(piece)
    return kept


def _sums(pairs: Iterable[tuple[str, int]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for name, amount in pairs:
        sums[name] += amount
    return sums


def _counts(rows: Iterable[tuple[str, str, int]]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outer, inner, amount in rows:
        counts[outer][inner] += amount
    return {outer: dict(inner) for outer, inner in counts.items()}
