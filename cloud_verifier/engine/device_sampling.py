"""Walk down all sessions' batches of a step, by tokens that an accelerator chooses for all rows in one pass.

A walk learns only by a row's token which row is next, so all rows are looked at where the logits are, before any walk,
and little more than a token of each is copied to the host. A token is taken only if it is certain to be what
`Sampler.choose` returns. Other rows, among them those with both penalties and top-p or min-p alone, go to the host if a
walk visits them.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray

from cloud_verifier.engine.sampling import Sampler
from outrider.core.coupling import position_key, position_keys
from outrider.core.sampling import SamplingParams
from outrider.core.target_token import FAR, SLACK, Head, Row, certain_tokens, head_among, tokens_among
from outrider.core.verification import TreeBatch, Walk

log = logging.getLogger(__name__)

_Ints = NDArray[np.int64]

UNKNOWN = -1
"""Stands for a token that is not certain."""


class SessionWalk(Walk):
    """Walks down one session's batch. first: index of the batch's first row among all logits of the step. error: that
    ended the walk, if one did."""

    def __init__(self, batch: TreeBatch, ends: Callable[[int, int], bool], sampler: Sampler, first: int) -> None:
        super().__init__(batch, ends)
        self.sampler = sampler
        self.first = first
        self.error: Exception | None = None
        self._below = batch.children if sampler.params.lossy else None

    @property
    def index(self) -> int:
        """Return the index of the row whose token is wanted next, or of the first one after the end."""
        return self.first + (self.row or 0)

    def follow(self, ahead: Sequence[int]) -> bool:
        """Go on by the tokens that are known, by index of the row; return whether the walk has ended."""
        while self.row is not None:
            token = ahead[self.first + self.row]
            if token == UNKNOWN or not self.go_on(token):
                return False
        return True

    def go_on(self, own: int | None, logits: Row | None = None) -> bool:
        """Take the token that is known to be the target's among all tokens, or one by the row's logits `[V]`.

        Return False if logits are needed and not given. An error ends the walk.
        """
        below = self._below[self.row or 0] if self._below is not None else ()
        try:
            if own is None or not self.sampler.confirms(own, self.position, self.tokens, below):
                if logits is None:
                    return False
                own = self.sampler.choose(logits, self.position, self.tokens, below)
            self.take(own)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # this session's alone: others share the step
            self.error, self.row = error, None
        return True


def walk_together(logits: torch.Tensor, walks: Sequence[SessionWalk], device: DeviceSampler | None) -> None:
    """Walk down all sessions' batches with the target's tokens; where that fails, the walk has an error.

    logits: `[R, V]`. device: chooses ahead what is certain there. The rows that are left are visited by all walks
    together, the first one of each before any second one: each round is one copy to the host, and one race of its rows.
    Raises AcceleratorError if the device itself has failed.
    """
    ahead = _ahead(logits, walks, device) if device is not None and walks else [UNKNOWN] * len(logits)
    while walking := [walk for walk in walks if not walk.follow(ahead)]:
        rows = _on_host(logits, [walk.index for walk in walking])
        for walk, row, token in zip(walking, rows, _certain_on_host(rows, walking), strict=True):
            walk.go_on(token, row)


def _ahead(logits: torch.Tensor, walks: Sequence[SessionWalk], device: DeviceSampler) -> list[int]:
    """Return the token of each row `[R]` that the device chooses, UNKNOWN for others; all rows of the walks are looked
    at."""
    of = np.repeat(np.arange(len(walks)), [1 + len(one.batch.ids) for one in walks])
    places = np.array([(one.first, one.batch.position) for one in walks])
    depths = np.array([depth for one in walks for depth in (0, *one.batch.depths)])
    rows = places[of, 0] + np.arange(len(of)) - np.searchsorted(of, of)
    paths: list[Sequence[int]] = []
    for one in walks:
        paths += _paths(one.batch) if one.sampler.params.penalised else [()] * (1 + len(one.batch.ids))
    whole = np.array_equal(rows, np.arange(len(logits)))
    part = logits if whole else logits[torch.from_numpy(rows).to(logits.device)]
    tokens = np.full(len(logits), UNKNOWN)
    tokens[rows] = device.choose(part, Wanted([one.sampler for one in walks], of, places[of, 1] + depths, paths))
    return tokens.tolist()


def _paths(batch: TreeBatch) -> list[tuple[int, ...]]:
    """Return the tokens from the root to each row of a batch, the root's own first."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(batch.parents, batch.tokens, strict=True):
        paths.append((*paths[parent], token))
    return paths


def _certain_on_host(rows: Sequence[Row], walks: Sequence[SessionWalk]) -> list[int | None]:
    """Return the token of each walk's row that is certain without the reference; None for others."""
    asked = [index for index, one in enumerate(walks) if not one.sampler.masks(one.position)]
    found = certain_tokens(
        [walks[index].sampler.penalised(rows[index], walks[index].tokens) for index in asked],
        [walks[index].sampler.params for index in asked],
        [position_key(walks[index].sampler.key, walks[index].position) for index in asked],
    )
    by_walk = dict(zip(asked, found, strict=True))
    return [by_walk.get(index) for index in range(len(walks))]


def _on_host(logits: torch.Tensor, rows: Sequence[int]) -> Sequence[Row]:
    """Return rows of the logits in float32; those on an accelerator are copied all at once."""
    if logits.device.type != "cpu":
        return [*logits[torch.tensor(rows, device=logits.device)].float().cpu().numpy()]
    if logits.dtype == torch.float32:
        table = logits.numpy()
        return [table[row] for row in rows]
    # One by one: to convert half precision into an array of all rows takes six times as long.
    return [logits[row].float().numpy() for row in rows]


# On the device

Race = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], NDArray[np.float64]]
"""`triton_race.race`."""
MAX_TOP_K = 1024
"""Rows with a greater top-k go to the host."""
PENALISED_ROWS = 32
"""Rows with penalties that are looked at together, since their logits are copied in float64."""
_LEAD = 1e-4
"""Nats by which a score in float32 must lead to be the greatest, beside _RELATIVE_LEAD of the greatest logit."""
_RELATIVE_LEAD = 1e-6
_SHARE_SLACK = 1e-4
"""More than the errors of a share of the probability, in float32."""


@dataclass(frozen=True)
class Wanted:
    """Lists the n rows whose tokens are wanted."""

    samplers: Sequence[Sampler]
    of: _Ints
    """`[n]`: index of each row's sampler."""
    positions: _Ints
    """`[n]`: generated position of each row."""
    paths: Sequence[Sequence[int]]
    """`[n]`: tokens of the step that lead to each row; empty where the sampler has no penalties."""

    def __getitem__(self, rows: _Ints) -> Wanted:
        return Wanted(self.samplers, self.of[rows], self.positions[rows], [self.paths[row] for row in rows])

    @property
    def params(self) -> list[SamplingParams]:
        """Return each row's parameters, `[n]`."""
        return [self.samplers[index].params for index in self.of]

    @property
    def keys(self) -> _Ints:
        """Return the key of each row's position, `[n]`."""
        return position_keys(np.array([one.key for one in self.samplers], dtype=np.uint64)[self.of], self.positions)


class DeviceSampler:
    """Chooses tokens ahead of the walks; after an error it chooses none."""

    def __init__(self, race: Race) -> None:
        self._race: Race | None = race

    @classmethod
    def on(cls, device: torch.device) -> DeviceSampler | None:
        """Return one for logits on this device, None if the host is the place to choose."""
        if device.type != "cuda" or find_spec("triton") is None:
            return None
        from cloud_verifier.engine.triton_race import race

        return cls(race)

    def choose(self, logits: torch.Tensor, wanted: Wanted) -> _Ints:
        """Return each row's token, UNKNOWN where it is not certain. logits: `[R, V]`.

        Raises AcceleratorError if the device itself has failed, and nothing else.
        """
        if self._race is not None:
            try:
                return choose_ahead(self._race, logits, wanted)
            except torch.AcceleratorError:
                raise
            except Exception:
                log.exception("tokens cannot be chosen on the device; they are chosen on the host")
                self._race = None
        return np.full(len(wanted.of), UNKNOWN)


@torch.inference_mode()
def choose_ahead(race: Race, logits: torch.Tensor, wanted: Wanted) -> _Ints:
    """Return each row's token, UNKNOWN where it is not certain. logits: `[R, V]`."""
    tokens = np.full(len(wanted.of), UNKNOWN)
    ways: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for index, sampler in enumerate(wanted.samplers):
        ways[_way(sampler.params, logits.shape[1]), sampler.params.penalised].append(index)
    ways.pop(("host", True), None)
    for (way, penalised), indices in ways.items():
        all_rows = np.flatnonzero(np.isin(wanted.of, indices))
        most = PENALISED_ROWS if penalised else max(1, len(all_rows))
        for rows in (all_rows[first : first + most] for first in range(0, len(all_rows), most)):
            part = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]
            tokens[rows] = _chosen(race, way, part, wanted[rows], penalised=penalised)
    return tokens


def _way(params: SamplingParams, vocabulary: int) -> str:
    if params.greedy:
        return "greedy"
    if 0 < params.top_k <= min(MAX_TOP_K, vocabulary - 1):
        return "top_k"
    # Penalties give float64, whose order is not certain in the kernels' float32.
    filtered = params.top_p < 1.0 or params.min_p > 0.0 or 0 < params.top_k < vocabulary
    return "host" if filtered and params.penalised else "race"


def _chosen(race: Race, way: str, logits: torch.Tensor, wanted: Wanted, *, penalised: bool) -> _Ints:
    """Return the tokens of rows `[n, V]` that are chosen in the same way, UNKNOWN where it is not certain."""
    if penalised:
        logits = _penalised(logits, wanted)
    if way == "greedy":
        return _greedy(logits)
    return _from_top_k(logits, wanted) if way == "top_k" else _from_race(race, logits, wanted)


def _penalised(logits: torch.Tensor, wanted: Wanted) -> torch.Tensor:
    """Return the logits `[n, V]` after penalties and bias, in float64: those of `processors.penalise`, bit by bit."""
    counts, params = [wanted.samplers[index].counts for index in wanted.of], wanted.params
    rates = np.array([(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params])
    again = [
        (row, token, counts[row].of(token) + times)
        for row, path in enumerate(wanted.paths)
        for token, times in Counter(path).items()
    ]
    biases = [(row, token, value) for row, one in enumerate(params) for token, value in one.logit_bias]
    rows = np.repeat(np.arange(len(counts)), [len(one.ids) for one in counts])
    known = rows, np.concatenate([one.ids for one in counts]), np.concatenate([one.times for one in counts])
    out, written = logits.double(), []
    for rows, ids, times in (known, _columns(again)):  # those on the path once more, with the greater counts
        at, values = _at(rows, ids, np.column_stack((times, rates[rows])), out)
        count, repetition, presence, frequency = values.unbind(1)
        own = out[at]
        own = torch.where(own > 0, own / repetition, own * repetition)
        written.append((at, own - presence * (count > 0) - frequency * count))
    for at, own in written:
        out[at] = own
    at, bias = _at(*_columns(biases), out)
    out[at] += bias
    return out


def _columns(entries: Sequence[tuple[int, int, float]]) -> tuple[_Ints, _Ints, NDArray[np.float64]]:
    """Return rows, ids and values of entries, `[m]` each."""
    table = np.array(entries, dtype=np.float64).reshape(-1, 3)
    return table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2]


def _at(
    rows: _Ints, ids: _Ints, values: NDArray[np.float64], logits: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return, beside `logits`, the places of entries and their values; without those of ids outside the vocabulary."""
    inside = ids < logits.shape[1]
    places, columns, numbers = (torch.from_numpy(part[inside]).to(logits.device) for part in (rows, ids, values))
    return (places, columns), numbers


def _greedy(logits: torch.Tensor) -> _Ints:
    """Return the first id of each row's greatest logit, UNKNOWN if that is not finite."""
    best, ids = logits.max(dim=1)
    values, tokens = torch.stack((best.double(), ids.double())).cpu().numpy()
    return np.where(np.isfinite(values), tokens, UNKNOWN).astype(np.int64)


def _from_top_k(logits: torch.Tensor, wanted: Wanted) -> _Ints:
    """Return the tokens of rows whose top-k leaves few, which are copied to the host and decided there."""
    best, ids = logits.topk(1 + max(params.top_k for params in wanted.params), dim=1)
    values, tokens = torch.stack((best.double(), ids.double())).cpu().numpy()
    heads: dict[int, Head] = {}
    for row, (params, at) in enumerate(zip(wanted.params, wanted.keys.view(np.uint64).tolist(), strict=True)):
        kept, order = values[row, : params.top_k + 1], np.argsort(tokens[row, : params.top_k + 1])
        # Which of the tokens beyond the last one are as likely is not known here.
        if not kept[-2] - kept[-1] > SLACK * params.temperature:
            continue
        if (head := head_among(tokens[row][order].astype(np.int64), kept[order], params, at)) is not None:
            heads[row] = head
    found = np.full(len(logits), UNKNOWN)
    chosen = zip(heads, tokens_among([*heads.values()]), strict=True)
    for row, token in chosen:
        found[row] = UNKNOWN if token is None else token
    return found


def _from_race(race: Race, logits: torch.Tensor, wanted: Wanted) -> _Ints:
    """Return the tokens of rows whose winner without filters is one that the filters leave."""
    limits = [(p.temperature, p.top_p, p.min_p, p.top_k) for p in (sampler.params for sampler in wanted.samplers)]
    temperature, top_p, min_p, top_k = np.array(limits)[wanted.of].T
    columns = wanted.keys, temperature.astype(np.float32)
    keys, temperatures = (torch.from_numpy(one).to(logits.device) for one in columns)
    tokens, lead, top, own, rank, near, share = race(logits, keys, temperatures, 2.0 * SLACK)
    filtered = (top_k > 0) & (top_k < logits.shape[1])
    with np.errstate(divide="ignore", invalid="ignore"):  # comparisons with NaN are false
        certain = (
            (abs(top) <= FAR * temperature)
            & (lead > _LEAD + _RELATIVE_LEAD * abs(top) / temperature)
            & (near == 0)
            & (~filtered | (rank < top_k))
            # What share of the probability top-k leaves is not known, so with both filters nothing is certain.
            & ((top_p == 1.0) | (~filtered & (share < top_p - _SHARE_SLACK)))
            & ((min_p == 0.0) | ((top - own) / temperature < -np.log(min_p) - SLACK))
        )
    return np.where(certain, tokens, UNKNOWN).astype(np.int64)
