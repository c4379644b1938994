"""Build the dataset of one training from the traffic log: training, validation and held-out texts.

    card = build(TrafficLog(url), folder, DatasetPlan(weights_hash=...), now=time.time())

writes a file of texts in each of `train/`, `validation/` and `heldout/` and, last, `card.json`. Validation
text chooses the best checkpoint of a training; held-out text is the gate's alone. A hash of its id decides whether a
session is held out, so no later dataset trains on what an earlier one was measured on, unless `heldout_share` was
made smaller in between.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from cloud_verifier.distill.run_folder import CARD, StageFailed
from cloud_verifier.distill.texts import HELDOUT, TRAIN, VALIDATION, Text, save_texts
from cloud_verifier.traffic.log import TrafficLog
from cloud_verifier.traffic.passage import Passage, join
from outrider.artifacts import atomic_files

CLASSES = 32
"""Traffic classes that are distinguished, the largest ones. Clients name classes freely; the rest are one."""
OTHERS = "(others)"
"""Name of all the classes together that are too many to be distinguished."""
FRESH_SHARE = 0.1
"""Least share of the fresh tokens with which a class is among those that a draft must win on."""
OVERLAP = 64
"""Tokens of context at the head of a text that continues another."""
VALIDATED = 16_000
"""About so many tokens are validated on at most, which a training reads at each evaluation."""
SHORTEST = 8
"""Tokens of the shortest text."""


class DatasetPlan(BaseModel):
    """Holds the settings of a dataset. Counts of tokens are of labels: tokens to learn from or to measure on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights_hash: str = ""
    """The target whose text is taken, "sha256:<hex>"."""
    fresh_since_unix: float = 0.0
    """Seconds; sessions that last produced from this time on are fresh traffic."""
    lasts_s: float = Field(default=0.0, ge=0)
    """Seconds that the dataset must last: passages that expire sooner are left out."""
    tokens: int = Field(default=1_000_000, ge=1)
    """About so many tokens are learnt from."""
    heldout_tokens: int = Field(default=40_000, ge=1)
    """About so many tokens are held out."""
    heldout_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the sessions that the gate measures on and no draft learns from."""
    validation_share: float = Field(default=0.04, gt=0, lt=0.5)
    """Share of the sessions by which training chooses its best checkpoint; at least one session."""
    replay_share: float = Field(default=0.3, ge=0, lt=1)
    """Share of the training tokens that is old traffic, so that a new domain does not displace earlier ones. Held-out
    text is of all ages, so that no class is forgotten unseen."""
    top: int = Field(default=32, ge=1)
    """Number of the target's likeliest ids that are kept of each position."""
    window: int = Field(default=512, ge=8)
    """Tokens of the longest text; longer ones are cut."""
    prompt: int = Field(default=256, ge=0)
    """Tokens of the prompt at the head of a session's first text, if the log has them; at most half a window. They
    cost training time and are never labels."""
    seed: int = 0


class DatasetCard(BaseModel):
    """A description of what a dataset holds. Counts of tokens are of labels."""

    model_config = ConfigDict(frozen=True)

    expires_unix: float
    """Seconds; when the first of its passages expires, and the dataset must be deleted."""
    fresh: tuple[str, ...]
    """Traffic classes of the fresh traffic."""
    train_tokens: int
    heldout_sessions: dict[str, int]
    """Held-out sessions by class."""

    @classmethod
    def read(cls, folder: Path) -> DatasetCard:
        """Read the card of a dataset. Raises OSError if there is none: the dataset was never finished."""
        return cls.model_validate_json((folder / CARD).read_text(encoding="utf-8"))


@dataclass
class Session:
    """Holds what the log has of one session."""

    session_id: str
    tenant: str
    traffic_class: str
    tokens: int = 0
    time_unix: float = 0.0
    """Time of its last passage."""

    @property
    def lot(self) -> float:
        """Return a number in [0, 1) that is drawn for it, without a seed: what is held out must never change."""
        digest = hashlib.blake2b(self.session_id.encode(), digest_size=8, person=b"heldout").digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53


def build(log: TrafficLog, folder: Path, plan: DatasetPlan, now: float) -> DatasetCard:
    """Write a dataset into `folder`, in place of one that is there.

    The log is read twice, so that the target's distributions are in memory only for what is chosen. Raises OSError, and
    StageFailed if the log holds nothing to learn from or to measure on.
    """
    sessions = _sessions(log, plan, now)
    chosen = _chosen(sessions, plan)
    wanted = {one.session_id for some in chosen.values() for one in some}
    passages: dict[str, list[Passage]] = defaultdict(list)
    for passage in _usable(log.read(now=now), plan, now):
        if passage.session_id in wanted:
            passages[passage.session_id].append(_narrowed(passage, plan.top))
    numbers = {name: number for number, name in enumerate(sorted(wanted))}
    texts = {
        name: [
            text
            for one in some
            for span in spans(passages[one.session_id])
            for text in cut(span, plan, one.traffic_class, numbers[one.session_id])
        ]
        for name, some in chosen.items()
    }
    measured = {text.tokens.tobytes() for name in (VALIDATION, HELDOUT) for text in texts[name]}
    texts[TRAIN] = [text for text in texts[TRAIN] if text.tokens.tobytes() not in measured]
    if not all(texts.values()):
        found = ", ".join(f"{name} {len(some)}" for name, some in texts.items())
        raise StageFailed(f"the traffic log is too small for a dataset: its texts are {found}, and all are needed")
    if folder.exists():
        shutil.rmtree(folder)
    for name, some in texts.items():
        save_texts(folder / name, some)
    card = DatasetCard(
        expires_unix=min(one.expires_unix for some in passages.values() for one in some),
        fresh=_fresh_classes(sessions, plan),
        train_tokens=sum(text.label_count for text in texts[TRAIN]),
        heldout_sessions=Counter(name for name, _ in {(text.traffic_class, text.session) for text in texts[HELDOUT]}),
    )
    atomic_files.write(folder / CARD, card.model_dump_json(indent=1).encode() + b"\n")  # last: it completes the dataset
    return card


def _usable(passages: Iterable[Passage], plan: DatasetPlan, now: float) -> Iterator[Passage]:
    """Yield the target's passages that last for a whole run."""
    for one in passages:
        if one.weights_hash == plan.weights_hash and one.expires_unix > now + plan.lasts_s:
            yield one


def _sessions(log: TrafficLog, plan: DatasetPlan, now: float) -> list[Session]:
    """Return the sessions that may be used. Raises StageFailed if there are none."""
    found: dict[str, Session] = {}
    for one in _usable(log.read(now=now, whole=False), plan, now):
        session = found.setdefault(one.session_id, Session(one.session_id, one.tenant, one.traffic_class))
        session.tokens += len(one)
        session.time_unix = max(session.time_unix, one.time_unix)
    if not found:
        raise StageFailed(
            f"the traffic log holds no passage of target {plan.weights_hash} that lasts for {plan.lasts_s / 60:.0f}"
            " minutes, which a run may take: record, let tenants' recordings be kept for longer, or train for fewer"
            " minutes"
        )
    sizes = Counter[str]()
    for session in found.values():
        sizes[session.traffic_class] += session.tokens
    named = {name for name, _ in sizes.most_common(CLASSES)}
    for session in found.values():
        session.traffic_class = session.traffic_class if session.traffic_class in named else OTHERS
    return list(found.values())


def _fresh_classes(sessions: Iterable[Session], plan: DatasetPlan) -> tuple[str, ...]:
    sizes = Counter[str]()
    for one in sessions:
        if one.time_unix >= plan.fresh_since_unix:
            sizes[one.traffic_class] += one.tokens
    return tuple(sorted(name for name, tokens in sizes.items() if tokens >= FRESH_SHARE * sizes.total()))


def _chosen(sessions: Sequence[Session], plan: DatasetPlan) -> Mapping[str, list[Session]]:
    """Return the sessions to learn from, to validate on and to hold out: a mix of ages, fair to classes and tenants."""
    drawn = sorted(sessions, key=lambda one: hashlib.blake2b(f"{plan.seed}/{one.session_id}".encode()).digest())
    fair = fairly(fairly(drawn, lambda one: one.tenant), lambda one: one.traffic_class)
    to_hold_out = [one for one in fair if one.lot < plan.heldout_share]
    rest = [one for one in fair if one.lot >= plan.heldout_share]
    # At least one session is validated on.
    bound = max(plan.heldout_share + plan.validation_share, min((one.lot for one in rest), default=0.0))
    to_learn = [one for one in rest if one.lot > bound]
    fresh = [one for one in to_learn if one.time_unix >= plan.fresh_since_unix]
    replayable = [one for one in to_learn if one.time_unix < plan.fresh_since_unix]
    new_tokens = min(sum(one.tokens for one in fresh), plan.tokens * (1 - plan.replay_share))
    old = taken(replayable, new_tokens * plan.replay_share / (1 - plan.replay_share) if fresh else plan.tokens)
    return {
        TRAIN: [*old, *taken(fresh, plan.tokens - sum(one.tokens for one in old))],
        VALIDATION: taken([one for one in rest if one.lot <= bound], VALIDATED),
        HELDOUT: taken(to_hold_out, plan.heldout_tokens),
    }


def fairly(sessions: Iterable[Session], group: Callable[[Session], str]) -> list[Session]:
    """Return sessions in an order of which any beginning has about as many tokens of each group as there are."""
    before: Counter[str] = Counter()
    ranked: list[tuple[int, int, Session]] = []
    for one in sessions:
        ranked.append((before[group(one)], len(ranked), one))
        before[group(one)] += one.tokens
    return [one for _, _, one in sorted(ranked, key=lambda entry: entry[:2])]


def taken(sessions: Iterable[Session], tokens: float) -> list[Session]:
    """Return the first sessions, until they have so many tokens."""
    found: list[Session] = []
    for one in sessions:
        if tokens <= 0:
            break
        found.append(one)
        tokens -= one.tokens
    return found


def spans(passages: Iterable[Passage]) -> list[Passage]:
    """Join the passages of a session, but not over gaps.

    After a failover two verifiers may have recorded the same positions: the earlier passage counts, and the text is cut
    there, since the two may disagree.
    """
    found: list[list[Passage]] = []
    """Parts of each span; each begins where the one before ends."""
    for passage in sorted(passages, key=lambda one: (one.start, one.time_unix)):
        end = found[-1][-1].end if found else passage.start
        new = passage.cut(max(0, end - passage.start), len(passage))
        if not len(new):
            continue
        if found and passage.start == end:
            found[-1].append(new)
        else:
            found.append([new])
    return [join(parts) for parts in found]


def cut(span: Passage, plan: DatasetPlan, name: str, session: int) -> Iterator[Text]:
    """Cut a span into texts of at most a window, context included. Texts that are too short are left out.

    The first text has the last ids of the span's prompt before it, but at most half a window of them; each further one
    the last `OVERLAP` tokens of the text before. Every token is a label of one text, but for the span's first where no
    prompt precedes it.
    """
    kept, at = min(plan.prompt, plan.window // 2), 0
    context = span.prompt[max(0, len(span.prompt) - kept) :]
    if not len(context):
        context, at = span.tokens[:1], 1
    while at < len(span):
        end = min(at + plan.window - len(context), len(span))
        if end - at + 1 >= SHORTEST:
            first = len(context)
            rows = (first, 0), (0, 0)
            yield Text(
                name,
                np.concatenate([context, span.tokens[at:end]]),
                np.pad(span.top_ids[at:end], rows, constant_values=-1),
                np.pad(span.top_log_probs[at:end], rows, constant_values=-np.inf),
                np.pad(span.tail[at:end], rows[0]),
                first,
                session,
            )
        context, at = span.tokens[max(0, end - min(OVERLAP, plan.window // 2)) : end], end


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
