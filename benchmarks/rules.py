"""Measure how often each acceptance rule accepts one of 1 to 4 children of the shipped draft.

The target writes after held-out prompts at temperature 0.8, and greedily. At every position of these texts p is the
target's distribution and q the draft's, the quantised file's in llama.cpp, both at that temperature. `coupled` is our
rule, with shared noise and without q; `typical` is the lossy one, with the same children. The others need q:
Leviathan's speculative sampling, which takes one draft; SpecInfer's multi-step sampling and SpecTr's k-sequential
selection, whose drafts are drawn independently; recursive rejection, whose drafts are drawn without replacement.
`bound` is the most that any lossless rule can have with independent drafts.

At temperature 0 all lossless rules are one: a child is accepted iff it is the target's token, so that drafts which are
drawn from q are all alike. `children` are then the draft's k likeliest tokens.

Shares that are drawn, those of `coupled`, `typical` and `without_replacement`, are means over several draws for each
position. `typical_changed` is the share of positions at which `typical` takes another token than the target's own.
`threshold` is the same rule with epsilon alone, whatever the entropy: the rollback of BiLD.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.support import harness
from benchmarks.support.acceptance_rules import acceptance, draw, without_replacement
from benchmarks.support.harness import Criterion, Pair, Size
from outrider.core.coupling import gumbel, position_key, session_key
from outrider.core.processors import log_softmax
from outrider.core.sampling import MAX_DELTA, TypicalAcceptance
from outrider.core.verification import typical_child
from outrider.llama import LlamaModel, TreeContext

TEMPERATURE = 0.8
CHILDREN = 4
"""The most children."""
FORMULAS = ("multi_step", "k_sequential", "bound")
"""Rules of any number of drafts whose acceptance has a formula."""
LOSSLESS = ("leviathan", *FORMULAS)
LOSSY = {"typical": TypicalAcceptance(), "threshold": TypicalAcceptance(delta=MAX_DELTA)}
Logits = NDArray[np.float64]


@dataclass(frozen=True)
class Position:
    """Hold the logits `[V]` of target and draft after the same text."""

    target: Logits
    draft: Logits


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("rules", __doc__)
    options = parser.parse_args(argv)
    size: Size = options.size
    prompts = harness.prompts("heldout", size.pick(smoke=2, quick=10, full=30))
    tokens, draws = size.pick(smoke=6, quick=40, full=84), size.pick(smoke=2, quick=4, full=8)
    disable_progress_bar()
    set_verbosity_error()
    pair = Pair.in_folder(options.models)
    encoded = [*pair.encode(prompts).values()]
    sampled = measure(positions(pair, encoded, tokens, TEMPERATURE), draws)
    greedy = measure_greedy(positions(pair, encoded, tokens, 0.0))
    _print(sampled, greedy)
    result = {"prompts": len(prompts), "temperature": TEMPERATURE, "sampled": sampled, "greedy": greedy}
    harness.finish(result, criteria(sampled), size)


def criteria(sampled: dict[str, list[float]]) -> list[Criterion]:
    """Return what should hold: with several children no rule that needs q is worth sending q for."""
    over = [name for name in ("multi_step", "k_sequential") for at in range(CHILDREN) if _exceeds(sampled, name, at)]
    worst = min(
        ours / theirs
        for name in ("multi_step", "k_sequential")
        for ours, theirs in zip(sampled["coupled"][1:], sampled[name][1:], strict=True)
    )
    return [
        Criterion.none("rules above the bound", len(over)),
        Criterion.bound(
            "coupled over rules that need q, with 2 to 4 independent drafts, at least", worst, at_least=1.0
        ),
    ]


def _exceeds(sampled: dict[str, list[float]], name: str, at: int) -> bool:
    return sampled[name][at] > sampled["bound"][at] + 1e-9


def positions(pair: Pair, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> Iterator[Position]:
    """Yield the positions of texts of up to so many tokens, which the target writes after the prompts."""
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32, local_files_only=True).eval()
    ends = target.generation_config.eos_token_id
    eos = set(ends if isinstance(ends, list) else [ends])
    with LlamaModel.load(pair.draft) as model, TreeContext(model, n_ctx=model.n_ctx_train) as context:
        for number, prompt in enumerate(prompts):
            rng = np.random.default_rng(number)
            cache, fed, row, parent = DynamicCache(), list(prompt), context.reset(prompt), 0
            for _ in range(tokens):
                with torch.inference_mode():
                    ids = torch.tensor([fed])
                    logits = target(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1].double().numpy()
                yield Position(logits, np.asarray(row, dtype=np.float64)[: len(logits)])
                noise = rng.gumbel(size=len(logits)) if temperature else 0.0
                token = int((logits / (temperature or 1.0) + noise).argmax())
                if token in eos:
                    break
                fed = [token]
                (parent,), rows = context.decode([parent], [token])
                row = rows[0]


def measure(recorded: Iterator[Position], draws: int) -> dict[str, list[float]]:
    """Return each rule's share of positions at which it accepts one of k children, k from 1 to CHILDREN."""
    totals: dict[str, list[NDArray[np.float64]]] = {}
    for at, position in enumerate(recorded):
        log_p, log_q = log_softmax(position.target / TEMPERATURE), log_softmax(position.draft / TEMPERATURE)
        p, q = np.exp(log_p), np.exp(log_q)
        for name in FORMULAS:
            shares = np.array([acceptance(name, p, q, count) for count in range(1, CHILDREN + 1)])
            totals.setdefault(name, []).append(shares)
        totals.setdefault("leviathan", []).append(np.array([acceptance("leviathan", p, q, 1)]))
        for seed in range(draws):
            for name, found in _drawn(
                log_p, log_q, session_key(seed, (at,)), np.random.default_rng([at, seed])
            ).items():
                totals.setdefault(name, []).append(found.astype(np.float64))
    return {name: np.mean(rows, axis=0).round(4).tolist() for name, rows in totals.items()} | {
        "positions": [len(totals["bound"])]
    }


def _drawn(log_p: Logits, log_q: Logits, key: int, rng: np.random.Generator) -> dict[str, NDArray[np.bool_]]:
    """Return by one draw of the noise which rules accept one of 1 to CHILDREN children."""
    ids = np.arange(len(log_p), dtype=np.int64)
    noise = gumbel(position_key(key, 0), ids)
    own = int((log_p + noise).argmax())
    noisy = log_q + noise
    children = np.argpartition(-noisy, CHILDREN)[:CHILDREN]
    children = children[np.argsort(-noisy[children])]
    coupled = np.logical_or.accumulate(children == own)
    p, q = np.exp(log_p), np.exp(log_q)
    p, q = p / p.sum(), q / q.sum()
    drafted = draw(q, CHILDREN, rng, replacement=False)
    accepted = without_replacement(p, q, drafted, rng)
    return {
        "coupled": coupled,
        **_lossy(ids, log_p, children, coupled),
        "without_replacement": np.logical_or.accumulate(np.array(drafted) == accepted),
    }


def _lossy(
    ids: NDArray[np.int64], log_p: Logits, children: NDArray[np.int64], exact: NDArray[np.bool_]
) -> dict[str, NDArray[np.bool_]]:
    """Return of each lossy rule whether it accepts one of 1 to CHILDREN children, and whether it changes the text.

    exact: whether the target's own token is one of them.
    """
    found = {}
    for name, rule in LOSSY.items():
        taken = [typical_child(ids, log_p, children[: count + 1].tolist(), rule) for count in range(CHILDREN)]
        changed = np.array([child is not None for child in taken]) & ~exact
        found |= {name: exact | changed, f"{name}_changed": changed}
    return found


def measure_greedy(recorded: Iterator[Position]) -> dict[str, list[float]]:
    """Return the same shares at temperature 0, where p of the lossy ones is the target's at temperature 1."""
    rows: dict[str, list[NDArray[np.bool_]]] = {}
    for position in recorded:
        own = int(position.target.argmax())
        children = np.argsort(-position.draft, kind="stable")[:CHILDREN]
        exact = np.logical_or.accumulate(children == own)
        ids = np.arange(len(position.target), dtype=np.int64)
        for name, found in {"children": exact, **_lossy(ids, position.target, children, exact)}.items():
            rows.setdefault(name, []).append(found)
    return {name: np.mean(found, axis=0).round(4).tolist() for name, found in rows.items()} | {
        "positions": [len(rows["children"])]
    }


def _print(sampled: dict[str, list[float]], greedy: dict[str, list[float]]) -> None:
    for title, table in ((f"temperature {TEMPERATURE}", sampled), ("greedy", greedy)):
        print(f"{title}, {table['positions'][0]:g} positions; children: 1, 2, 3, 4")
        for name, shares in table.items():
            if name != "positions":
                print(f"  {name:20}" + " / ".join(f"{share:.3f}" for share in shares))


if __name__ == "__main__":
    main()
