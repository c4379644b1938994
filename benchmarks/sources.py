"""Measure how many tokens a verification step brings with each draft source, and with several together.

The target writes after held-out prompts and after prompts that its answers quote, greedily and at temperature 0.8 with
the noise of our sessions. These texts are then played again, without a verifier and without a network: the device's own
drafter proposes until it rests, a step evaluates all of its nodes, and what the text accepts is committed. So a figure
is what a source knows, not what time it has. A tree holds up to 8 nodes.

Before that each arm goes through texts after prompts for tuning, from which its calibrators learn. The store has
n-grams that at least three of many other texts of this target share, as a tenant's store does. Texts with more than 30%
repeated 4-grams are counted apart, in `repetitive`. `mixture_over_best` is the least ratio of several sources together
to the best of them alone, greedy or sampled.

Sources with `server` are the verifier's own. An engine writes the same texts with them, in steps of up to 8 nodes that
cost next to nothing, and with a device's nodes beside them in the last arms. The first token of a text has no nodes of
theirs: they begin after the prompt. With each setting they begin anew with its lessons, since recycled tokens would
know a greedy text when its prompt comes again at temperature 0.8. `medusa` and `blockwise`, which has one candidate a
head, are measured with a file of Medusa's heads (`--medusa`), since none is shipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.support import harness, questions
from benchmarks.support.harness import Criterion, Pair, Prompt, Size
from benchmarks.support.server_replay import ServerReplay
from benchmarks.support.texts import repetitive
from cloud_verifier.engine.server_draft.base import CHILDREN, ServerSource
from cloud_verifier.engine.server_draft.head_models import load_heads
from cloud_verifier.engine.server_draft.heads import HeadsSource
from cloud_verifier.engine.server_draft.llama_draft import LlamaServerDraft
from cloud_verifier.engine.server_draft.ngram import NgramSource as ServerNgramSource
from cloud_verifier.engine.server_draft.recycling import RecyclingSource
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import DecodeLatency, SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask
from edge_agent.drafting.sources.llama import LlamaSource
from edge_agent.drafting.sources.ngram import NgramSource
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.coupling import gumbel, position_key, session_key
from outrider.core.errors import BadRequest
from outrider.core.ngram import NgramTable
from outrider.core.processors import log_softmax
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT
from outrider.llama import ChainContext, LlamaModel, TreeContext

SETTINGS = {"greedy": 0.0, "T=0.8": 0.8}
SEED = 20_261_123
NODES = 8
LATENCY = DecodeLatency(((1, 1e-3), (8, 2e-3)))
"""Seconds of a decode, the same in every run: they decide which nodes a draft model evaluates."""
PLAN = SpeculationPlan(NODES, 16, NODES, min_acceptance=0.05, draft_wait_s=1.0, step_s=0.03)
STORE_SESSIONS = 3
"""Texts that must have an n-gram for it to be in the store; the default of `outrider-distill store`."""
BATCH = 64
MOST_TIES = 0.02
"""Share of the texts that an engine may write in another way: where two tokens are as likely, rounding decides."""
LESSON = "lesson"
"""Kind of the texts that sources learn from before the others are measured."""
ARMS: Mapping[str, tuple[str, ...]] = {
    "ngram": ("ngram",),
    "ngram_store": ("ngram_store",),
    "draft": ("draft",),
    "narrow": ("narrow",),
    "draft+ngram": ("draft", "ngram"),
    "draft+ngram_store": ("draft", "ngram_store"),
    "narrow+ngram": ("narrow", "ngram"),
    "narrow+ngram_store": ("narrow", "ngram_store"),
    "draft+narrow": ("draft", "narrow"),
}
"""Arm -> its sources on the device, the best one first."""
SERVER_ARMS: Mapping[str, tuple[str, ...]] = {
    "server ngram": ("server ngram",),
    "server ngram_store": ("server ngram_store",),
    "server recycling": ("server recycling",),
    "server heads": ("server heads",),
    "server medusa": ("server medusa",),
    "server blockwise": ("server blockwise",),
    "server gguf": ("server gguf",),
    "server ngram+recycling": ("server ngram", "server recycling"),
    "server heads+ngram+recycling": ("server heads", "server ngram", "server recycling"),
    "server gguf+ngram": ("server gguf", "server ngram"),
    "ngram, server heads+ngram": ("ngram", "server heads", "server ngram"),
    "draft, server heads+ngram": ("draft", "server heads", "server ngram"),
}
"""Arm -> its sources on the verifier, and those of the device first, if it has any. `gguf` is the shipped draft."""
MIXTURES = {arm: sources for arm, sources in {**ARMS, **SERVER_ARMS}.items() if len(sources) > 1}
WANTED = {"ngram": 1.45, "ngram_store": 1.8, "heads": 2.2}


@dataclass(frozen=True)
class TargetText:
    """Hold what the target wrote after a prompt. kind: the prompt's, or LESSON."""

    kind: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    sampling: SamplingParams


@dataclass
class StepCount:
    """Count the steps that texts take, their tokens, and the nodes that the steps evaluate."""

    texts: int = 0
    tokens: int = 0
    steps: int = 0
    nodes: int = 0

    def add(self, other: StepCount) -> None:
        self.texts += other.texts
        self.tokens += other.tokens
        self.steps += other.steps
        self.nodes += other.nodes

    @property
    def tokens_per_step(self) -> float | None:
        return round(self.tokens / self.steps, 3) if self.steps else None

    @property
    def shown(self) -> dict[str, Any]:
        nodes = round(self.nodes / self.steps, 2) if self.steps else None
        return {"texts": self.texts, "tokens_per_step": self.tokens_per_step, "nodes_per_step": nodes}


@dataclass
class ArmResult:
    """Hold the counts of one arm with one sampling setting: by kind, without repetitive texts, which stand apart."""

    kinds: dict[str, StepCount] = field(default_factory=dict)
    repetitive: StepCount = field(default_factory=StepCount)

    def add(self, text: TargetText, counted: StepCount) -> None:
        """Add the steps of a text."""
        count = self.repetitive if repetitive(text.output) else self.kinds.setdefault(text.kind, StepCount())
        count.add(counted)

    @property
    def all(self) -> StepCount:
        total = StepCount()
        for count in self.kinds.values():
            total.add(count)
        return total

    @property
    def shown(self) -> dict[str, Any]:
        rows = {"all": self.all, **self.kinds, "repetitive": self.repetitive}
        return {name: count.shown for name, count in rows.items()}


class Target:
    """Write texts with the target, in float32."""

    def __init__(self, pair: Pair) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            pair.target, dtype=torch.float32, local_files_only=True
        ).eval()
        ends = self._model.generation_config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])

    @torch.inference_mode()
    def text(self, kind: str, prompt: Sequence[int], tokens: int, temperature: float) -> TargetText:
        """Return what the target writes with our sessions' noise."""
        sampling = SamplingParams(temperature=temperature, seed=SEED)
        key = session_key(SEED, prompt)
        cache, fed, output = DynamicCache(), list(prompt), list[int]()
        while len(output) < tokens and not self.ends.intersection(output[-1:]):
            logits = self._model(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True).logits[0, -1]
            row = logits.double().numpy()
            if temperature:
                ids = np.arange(len(row), dtype=np.int64)
                row = log_softmax(row / temperature) + gumbel(position_key(key, len(output)), ids)
            fed = [int(row.argmax())]
            output += fed
        return TargetText(kind, tuple(prompt), tuple(output), sampling)

    @torch.inference_mode()
    def many(self, prompts: Sequence[Sequence[int]], tokens: int) -> Iterator[list[int]]:
        """Yield what the target writes after each prompt at temperature 0.8, many at a time; prompts are cut short."""
        torch.manual_seed(SEED)
        for begin in range(0, len(prompts), BATCH):
            some = prompts[begin : begin + BATCH]
            length = min(map(len, some))
            ids = torch.tensor([list(prompt[-length:]) for prompt in some])
            written = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=0.8,
                top_k=0,
                max_new_tokens=tokens,
                pad_token_id=min(self.ends),
            )
            for row in written[:, length:].tolist():
                end = next((at for at, token in enumerate(row) if token in self.ends), len(row))
                yield row[: end + 1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("sources", __doc__)
    parser.add_argument("--medusa", type=Path, metavar="FILE", help="Medusa's heads for the target, to measure too")
    parser.add_argument(
        "--only", action="append", metavar="ARM", help="measure this arm (repeatable) and its sources alone"
    )
    options = parser.parse_args(argv)
    chosen = _chosen(options.only or MIXTURES.keys() | ARMS.keys() | SERVER_ARMS.keys())
    size: Size = options.size
    each, tokens = size.pick(smoke=1, quick=1, full=10), size.pick(smoke=12, quick=32, full=96)
    lessons, stored = size.pick(smoke=1, quick=2, full=24), size.pick(smoke=8, quick=128, full=4096)
    disable_progress_bar()
    set_verbosity_error()
    pair = Pair.in_folder(options.models)
    target = Target(pair)
    prompts = [*harness.prompts("heldout"), *harness.prompts("quoting")]
    texts = list(_written(target, pair, _first_of_each(prompts, each), tokens))
    taught = list(_written(target, pair, harness.prompts("tuning", lessons), tokens, kind=LESSON))
    with_store = any("store" in source for arm in chosen for source in {**ARMS, **SERVER_ARMS}[arm])
    store = built_store(target, pair, stored, tokens) if with_store else NgramTable.build([[0]], least_sequences=1)
    print(f"{len(texts)} texts, {len(taught)} to learn from, {len(store.counts)} n-grams in the store", flush=True)
    counted = {
        arm: measure(pair, sources, store, taught, texts, target.ends) for arm, sources in ARMS.items() if arm in chosen
    }
    counted |= measure_server(pair, store, taught, texts, options.medusa, chosen)
    found = by_arm(counted, texts)
    report(found)
    result = summary(found)
    harness.finish(result | {"arms": _shown(found)}, criteria(result), size)


def _chosen(wanted: Collection[str]) -> set[str]:
    """Return the wanted arms with those of their sources alone. Raises BadRequest for one that does not exist."""
    arms = {**ARMS, **SERVER_ARMS}
    if unknown := [arm for arm in wanted if arm not in arms]:
        raise BadRequest(f"there is no arm {unknown[0]!r}; --only takes one of: {', '.join(arms)}", field="only")
    return {*wanted, *(source for arm in wanted for source in arms[arm])}


def built_store(target: Target, pair: Pair, count: int, tokens: int) -> NgramTable:
    """Return the n-grams that several of `count` texts share, after prompts that are measured nowhere."""
    made = [*questions.arithmetic(count // 2, SEED), *questions.code(count - count // 2, SEED)]
    ids = pair.encode(Prompt(str(number), "store", text) for number, text in enumerate(made))
    some = sorted((one[-160:] for one in ids.values()), key=len)
    return NgramTable.build(target.many(some, tokens), least_sequences=STORE_SESSIONS)


def measure(
    pair: Pair,
    names: Sequence[str],
    store: NgramTable,
    lessons: Sequence[TargetText],
    texts: Sequence[TargetText],
    ends: frozenset[int],
) -> list[StepCount | None]:
    """Play the texts with one drafter that has these sources, after the lessons; return the counts by text."""
    with contextlib.ExitStack() as stack:
        drafter = Drafter([_source(pair, name, store, stack) for name in names], clock=lambda: 0.0)
        for text in lessons:
            play(drafter, text, ends)
        return [play(drafter, text, ends) for text in texts]


def measure_server(
    pair: Pair,
    store: NgramTable,
    lessons: Sequence[TargetText],
    texts: Sequence[TargetText],
    medusa: Path | None = None,
    chosen: Collection[str] = SERVER_ARMS,
) -> dict[str, list[StepCount | None]]:
    """Let an engine write the texts with each chosen arm, after the lessons; return the counts by text.

    Arms whose heads are in no file are left out. A text that the engine writes in another way, as a tie may make it,
    has None. Raises RuntimeError for more than a few of them.
    """
    model = TargetModel.load(pair.target)
    model.keep_states()
    check_numerics(model)
    found: dict[str, list[StepCount | None]] = {}
    files = {"server heads": pair.heads, "server medusa": medusa, "server blockwise": medusa}
    for arm, names in SERVER_ARMS.items():
        if arm not in chosen or any(files.get(name, model) is None for name in names):
            continue
        found[arm], others = [None] * len(texts), 0
        for temperature in SETTINGS.values():
            with contextlib.ExitStack() as stack:
                own = [
                    _server_source(pair, model, name, store, files.get(name), stack)
                    for name in names
                    if name.startswith("server")
                ]
                device = [_source(pair, name, store, stack) for name in names if not name.startswith("server")]
                replay = ServerReplay(model, own, PLAN, Drafter(device, clock=lambda: 0.0) if device else None)
                for number, text in enumerate((*lessons, *texts), -len(lessons)):
                    if text.sampling.temperature != temperature:
                        continue
                    tokens, steps, nodes = replay.write(text.prompt, text.sampling, len(text.output))
                    if tuple(tokens) != text.output:
                        others += 1
                    elif number >= 0:
                        found[arm][number] = StepCount(1, len(tokens), steps, nodes)
        if others:
            print(f"{arm}: {others} of {len(lessons) + len(texts)} texts are not the target's", flush=True)
        if others > MOST_TIES * (len(lessons) + len(texts)):
            raise RuntimeError(f"with {arm} the engine writes {others} other texts than the target")
    return found


def by_arm(
    counted: Mapping[str, Sequence[StepCount | None]], texts: Sequence[TargetText]
) -> dict[str, dict[str, ArmResult]]:
    """Return the counts by arm and setting, of the texts that every arm has counted."""
    settings = {temperature: setting for setting, temperature in SETTINGS.items()}
    found = {arm: {setting: ArmResult() for setting in SETTINGS} for arm in counted}
    for number, text in enumerate(texts):
        counts = {arm: count for arm, each in counted.items() if (count := each[number]) is not None}
        if len(counts) == len(counted):
            for arm, count in counts.items():
                found[arm][settings[text.sampling.temperature]].add(text, count)
    return found


def play(drafter: Drafter, text: TargetText, ends: frozenset[int]) -> StepCount:
    """Return the steps of one text, if each evaluates all nodes that the drafter has proposed by then."""
    drafter.begin(DraftTask(text.prompt, sampling=text.sampling, max_tokens=len(text.output), ends=ends), PLAN)
    count, position = StepCount(texts=1), 0
    children: dict[int, dict[int, int]] = {}
    while position < len(text.output):
        while drafter.step():
            pass
        update = drafter.harvest(moved=False)
        for node in update.nodes if update is not None else ():
            children.setdefault(node.parent, {})[node.token] = node.id
        count.nodes += _size(children, ROOT)
        at, begin = ROOT, position
        while position < len(text.output):
            # The target's own token comes with every step, whether a node carries it or not.
            child = children.get(at, {}).get(text.output[position])
            position += 1
            if child is None:
                at = -1
                break
            at = child
        children = _below(children, at)
        drafter.advance(text.output[begin:position])
        count.steps += 1
        count.tokens += position - begin
    return count


def _size(children: Mapping[int, Mapping[int, int]], node: int) -> int:
    """Return the number of nodes below one."""
    return sum(1 + _size(children, child) for child in children.get(node, {}).values())


def _below(children: Mapping[int, Mapping[int, int]], node: int) -> dict[int, dict[int, int]]:
    """Return what is below a node, which becomes the root; nothing if it is not in the tree."""
    kept, left = dict[int, dict[int, int]](), [(node, ROOT)]
    while left:
        old, new = left.pop()
        if old in children:
            kept[new] = dict(children[old])
            left += [(child, child) for child in children[old].values()]
    return kept


def _source(pair: Pair, name: str, store: NgramTable, stack: contextlib.ExitStack) -> CalibratedSource:
    """Return a source with calibrators that know nothing yet. stack: frees what it holds."""
    if name.startswith("ngram"):
        table = store if name == "ngram_store" else None
        return CalibratedSource(NgramSource(lambda: table), Calibrator(), Calibrator())
    model = stack.enter_context(LlamaModel.load(pair.draft if name == "draft" else pair.narrow))
    context = stack.enter_context(TreeContext(model, n_ctx=model.n_ctx_train))
    return CalibratedSource(
        LlamaSource(context, shared_vocabulary=context.vocab_size), Calibrator(), Calibrator(), LATENCY
    )


def _server_source(
    pair: Pair, model: TargetModel, name: str, store: NgramTable, file: Path | None, stack: contextlib.ExitStack
) -> ServerSource:
    """Return a source of the verifier that proposes in every step. file: of heads. stack: frees what it holds."""
    source: ServerSource
    match name.removeprefix("server "):
        case kind if file is not None:
            heads = load_heads(file, f"sha256:{model.weights_hash}")
            children = 1 if kind == "blockwise" else CHILDREN
            source = HeadsSource(heads, model, vocabulary=model.vocab_size, children=children)
        case "gguf":
            draft = stack.enter_context(LlamaModel.load(pair.draft))
            chains = stack.enter_context(ChainContext(draft, length=draft.n_ctx_train, count=1))
            source = LlamaServerDraft(chains, depth=NODES, siblings=PLAN.siblings - 1, vocabulary=model.vocab_size)
        case "recycling":
            source = RecyclingSource()
        case kind:
            source = ServerNgramSource(lambda _: store if kind == "ngram_store" else None)
    source.pauses = False
    return source


def _first_of_each(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return the first `count` prompts of each kind."""
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    return [prompt for kind in kinds for prompt in [one for one in prompts if one.kind == kind][:count]]


def _written(
    target: Target, pair: Pair, prompts: Sequence[Prompt], tokens: int, kind: str | None = None
) -> Iterator[TargetText]:
    """Yield what the target writes after each prompt, with each setting. kind: of all of them, if not the prompts'."""
    ids = pair.encode(prompts)
    for temperature in SETTINGS.values():
        for prompt in prompts:
            yield target.text(kind or prompt.kind, ids[prompt.id], tokens, temperature)


def report(found: Mapping[str, Mapping[str, ArmResult]]) -> None:
    """Print tokens per step, with nodes per step in brackets, of each arm by kind."""
    for setting in SETTINGS:
        kinds = next(iter(found.values()))[setting].shown
        print(f"\n{setting}, tokens per step (nodes per step); texts: {_counts(kinds)}")
        for arm, results in found.items():
            row = [
                f"{name} {cell['tokens_per_step']} ({cell['nodes_per_step']})"
                for name, cell in _cells(results[setting])
            ]
            print(f"{arm:<28} {'  '.join(row)}", flush=True)


def _counts(shown: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} {cell['texts']}" for name, cell in shown.items())


def _cells(result: ArmResult) -> list[tuple[str, dict[str, Any]]]:
    return list(result.shown.items())


def summary(found: Mapping[str, Mapping[str, ArmResult]]) -> dict[str, float | None]:
    """Return the figures of the last line: tokens per step at temperature 0.8, and the least ratio of a mixture."""
    per_step = {
        (arm, setting): results[setting].all.tokens_per_step for arm, results in found.items() for setting in SETTINGS
    }
    ratios = []
    for arm, sources in MIXTURES.items():
        for setting in SETTINGS:
            best = [alone for source in sources if (alone := per_step.get((source, setting))) is not None]
            both = per_step.get((arm, setting))
            if both is not None and best:
                ratios.append(both / max(best))
    singles = {arm: per_step.get((arm, "T=0.8")) for arm in ("ngram", "ngram_store", "draft", "narrow")}
    heads = per_step.get(("server heads", "T=0.8"))
    return {**singles, "heads": heads, "mixture_over_best": round(min(ratios), 3) if ratios else None}


def _shown(found: Mapping[str, Mapping[str, ArmResult]]) -> dict[str, Any]:
    return {arm: {setting: result.shown for setting, result in results.items()} for arm, results in found.items()}


def criteria(result: Mapping[str, float | None]) -> list[Criterion]:
    """Return what should hold of texts that do not repeat themselves. Short runs enforce none of it."""
    wanted = [(name, result[name], least) for name, least in {**WANTED, "mixture_over_best": 0.99}.items()]
    return [Criterion.bound(name, value, at_least=least, enforced_from=None) for name, value, least in wanted]


if __name__ == "__main__":
    main()
