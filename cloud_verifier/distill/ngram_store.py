"""Build a tenant's n-gram store from its recorded traffic, and measure what it gains on sessions that were held out.

Only n-grams that at least `least_sessions` sessions of this one tenant have in common are in a store, and only of what
the target answered: prompts are never in it. The sessions that a store is measured on are those that no draft learns
from either (`session_lot`).
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cloud_verifier.distill.config import DistillConfig, GateRule
from cloud_verifier.distill.data.dataset import session_lot
from cloud_verifier.distill.data.plan import DatasetPlan
from cloud_verifier.distill.data.spans import TextSpan, join_passages, without_distributions
from cloud_verifier.distill.errors import TooLittleTraffic
from cloud_verifier.distill.gguf.eval_gguf import (
    CHAIN,
    CONTEXT,
    TREE,
    UNPROMPTED,
    DraftComparison,
    DraftCounts,
    TextComparison,
    steps,
)
from cloud_verifier.distill.publishing import gate
from cloud_verifier.distill.publishing.gate import GateVerdict
from cloud_verifier.distill.publishing.publisher import Publisher, TargetHashes
from cloud_verifier.distill.publishing.release_client import STABLE, ReleaseRecord
from cloud_verifier.traffic.segments import SegmentLog
from outrider.artifacts.ngram_store import LEAST_SESSIONS, NgramStore
from outrider.core.errors import BadRequest
from outrider.core.ngram import NgramModel, NgramTable

LEAST, MAX_BYTES = 3, 64 << 20
"""Sessions that have an n-gram, and bytes of a store's arrays, where nothing else is asked for."""


def build(
    log: SegmentLog,
    target: TargetHashes,
    dataset: DatasetPlan,
    now: float,
    least_sessions: int = LEAST,
    max_bytes: int = MAX_BYTES,
) -> tuple[NgramStore, list[TextSpan]]:
    """Return a store of the recorded sessions of `target.tenant`, and the texts of those that were held out.

    dataset: says how many sessions and tokens are held out for measuring. max_bytes: of the arrays; the rarest n-grams
    beyond it are left out. Raises BadRequest, TooLittleTraffic, OSError.
    """
    if not target.tenant:
        raise BadRequest("a store is of one tenant; name it", field="tenant")
    if least_sessions < LEAST_SESSIONS:
        raise BadRequest.bound("least_sessions", least_sessions, f"at least {LEAST_SESSIONS}: texts are private")
    recorded = (
        without_distributions(one)
        for one in log.read(dataset.since_unix, now)
        if one.tenant == target.tenant and one.weights_hash == target.weights_hash
    )
    sessions: dict[str, list[TextSpan]] = {}
    for span in join_passages(recorded):
        sessions.setdefault(span.session_id, []).append(span)
    held_out = [name for name in sessions if session_lot(name) < dataset.heldout_share]
    read = [spans for name, spans in sessions.items() if name not in held_out]
    if len(read) < least_sessions:
        raise TooLittleTraffic(
            f"the traffic log has {len(read)} sessions of tenant {target.tenant!r} with this target to build a store"
            f" of, at least {least_sessions} are needed: is its recording on?"
        )
    table = NgramTable.build(_joined(read), least_sequences=least_sessions).within(max_bytes)
    store = NgramStore(
        table, target.weights_hash, target.tokenizer_hash, target.tenant, least_sessions, sessions=len(read)
    )
    measured, tokens = [], 0
    for span in itertools.chain.from_iterable(sessions[name] for name in sorted(held_out, key=session_lot)):
        if tokens < dataset.heldout_tokens:
            measured.append(span)
            tokens += span.label_count
    return store, measured


def write_store(config: DistillConfig, target: TargetHashes, out: Path, **limits: int) -> GateVerdict:
    """Build a store, and write it to a file if the gate lets it pass. limits: further arguments of `build`.

    Raises what `build` raises.
    """
    store, texts = _built(config, target, **limits)
    verdict = judge(store, None, texts, config.gate_rule)
    if verdict.passed:
        store.save(out)
    return verdict


async def publish_store(
    config: DistillConfig, publisher: Publisher, **limits: int
) -> tuple[GateVerdict, ReleaseRecord | None]:
    """Build a store, and publish it if the gate lets it pass; otherwise the record is None.

    It must be better than the tenant's stable store, if that is among the artifacts. limits: further arguments of
    `build`. Raises what `build` raises, and core errors.
    """
    await publisher.restore(known := await publisher.known())
    store, texts = await asyncio.to_thread(_built, config, publisher.target, **limits)
    stable = next((one for one in known.values() if one.state == STABLE), None)
    incumbent, parent = None, ""
    if stable is not None and (path := publisher.file(stable.digest)).is_file():
        incumbent, parent = NgramStore.load(path, 1 << 31), stable.digest
    verdict = await asyncio.to_thread(judge, store, incumbent, texts, config.gate_rule)
    if not verdict.passed:
        return verdict, None
    config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=config.state) as folder:
        file = Path(folder) / "store"
        await asyncio.to_thread(store.save, file)
        return verdict, await publisher.publish(file, "NGRAM", parent, verdict.metrics())


def _built(config: DistillConfig, target: TargetHashes, **limits: int) -> tuple[NgramStore, list[TextSpan]]:
    return build(SegmentLog(config.traffic), target, DatasetPlan(**config.dataset_options), time.time(), **limits)


def judge(store: NgramStore, incumbent: NgramStore | None, texts: Sequence[TextSpan], rule: GateRule) -> GateVerdict:
    """Decide whether a store may go out, by what it gains over the one in use, or over none, on held-out texts.

    The rule is that of drafts, but for the time of a proposal, which is microseconds with any store.
    """
    comparison = compare(store.table, incumbent.table if incumbent is not None else None, texts)
    classes = {text.traffic_class for text in texts}
    return gate.decide(comparison, classes, replace(rule, slower=float("inf")))


def compare(candidate: NgramTable, incumbent: NgramTable | None, texts: Sequence[TextSpan]) -> DraftComparison:
    """Count the verification steps that texts take with the session's own n-grams and a store, without a model.

    incumbent: the table to compare with; None compares with the session's own n-grams alone. The shapes of the token
    trees are those in which drafts are measured (`eval_gguf`).
    """
    numbers = {name: number for number, name in enumerate(sorted({text.session_id for text in texts}))}
    models = NgramModel([candidate]), NgramModel([incumbent] if incumbent is not None else [])
    taken_s, positions, compared = [0.0, 0.0], 0, []
    for text in texts:
        tokens = [*text.prompt.tolist(), *text.tokens.tolist()][:CONTEXT]
        first = max(len(text.prompt) + text.first, UNPROMPTED)
        if first >= len(tokens):
            continue
        counts = []
        for index, model in enumerate(models):
            started = time.perf_counter()
            counts.append(_counts(model, tokens, first))
            taken_s[index] += time.perf_counter() - started
        positions += len(tokens) - first
        compared.append(TextComparison(text.traffic_class, numbers[text.session_id], len(tokens) - first, *counts))
    candidate_ms, incumbent_ms = (1e3 * seconds / max(1, positions) for seconds in taken_s)
    return DraftComparison(tuple(compared), candidate_ms, incumbent_ms)


def _counts(model: NgramModel, tokens: Sequence[int], first: int) -> DraftCounts:
    """Count what a model predicts of the tokens from `first` on."""
    model.reset(tokens[:first])
    ranks = np.full(len(tokens) - first, TREE, np.int8)
    for index, token in enumerate(tokens[first:]):
        found = np.flatnonzero(model.following()[0][:TREE] == token)
        if len(found):
            ranks[index] = found[0]
        model.extend([token])
    return DraftCounts(int((ranks == 0).sum()), steps(ranks, CHAIN, 1), steps(ranks, CHAIN, TREE))


def _joined(sessions: Sequence[Sequence[TextSpan]]) -> Iterator[list[int]]:
    """Yield each session as one sequence, whose spans have a number between them that is no token.

    No two of these numbers are equal. So an n-gram over a gap is of one session alone, and never in a store.
    """
    gaps = itertools.count(1)
    for spans in sessions:
        sequence = spans[0].tokens.tolist()
        for span in spans[1:]:
            sequence += [-next(gaps), *span.tokens.tolist()]
        yield sequence
