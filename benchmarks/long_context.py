"""Measure drafts behind long contexts: acceptance, speed and the time to the first token, by the length of the context.

Target and draft are copies of the pair whose positions YaRN stretches to 24,576: transformers and llama.cpp compute it
alike, and it needs no training. The context is code of Python's standard library that no model of the pair was trained
on, and a held-out prompt comes after it: one of code goes on in the last file, another one begins a text of its own.

A device without a draft (plain streaming), one with the shipped draft, one with n-grams, and one with both, as devices
have by default, send every prompt, greedily and at temperature 0.8, in an order that rotates; the verifier has one core
and the devices another. Verifier and devices have read the context by then, as before a chat's next turn; the first
requests, for which they read it, stand apart in `first_request_s`. Outputs with more than 30% repeated 4-grams count
apart. Every output must be plain streaming's, and the first of each context that of Hugging Face's own forward of the
same copy; where two tokens are as likely, rounding may decide, which is counted in `ties`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from benchmarks.support import harness
from benchmarks.support.harness import Criterion, Pair, Prompt, Size
from benchmarks.support.long_prompts import LongPrompts
from benchmarks.support.reference import TIE, Reference, ReferenceSampling
from benchmarks.support.texts import APART, repetitive
from edge_agent.config import EdgeSettings
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.types import Completion, Options
from outrider.core.errors import BadRequest, between
from outrider.llama import LlamaModel, TextContext

POSITIONS = 24_576
"""Positions of the copies, prompt and output together."""
SETTINGS = {"greedy": 0.0, "T=0.8": 0.8}
SEED = 20_261_126
STREAMING, DRAFT, NGRAM, BOTH = ARMS = ("streaming", "draft", "ngram", "draft+ngram")
TRAINED = 1_024
"""Positions of the windows that the shipped pair was trained on. Its configuration states 2,048, but a draft that YaRN
stretches from those predicts code behind 4,096 tokens much worse."""
SHORT = 1_024
"""Tokens of the text on which the copies are compared with the pair itself."""
LIKE_SHIPPED = 0.9
"""Least agreement of the copies' first choices on that text, over that of the pair itself."""
WARM, COLD = "Part 1", "Part 2"
"""First lines of contexts, before their length: that of the texts, and one that no cache holds when it is read."""
POLL_S = 0.005
"""Seconds between two looks at whether a device has sent a proposal."""
PAYS = 0.97
"""Speed that both sources should have over the best of one of them and plain streaming, behind any context."""
PATIENCE = 2_000
"""Most tokens that a session gets until its draft, which reads the context meanwhile, sends its first proposal."""


@dataclass(frozen=True)
class LongContextSize:
    """Choose what a run measures."""

    contexts: tuple[int, ...]
    """Tokens before the prompt."""
    prompts: int
    tokens: int
    """Most tokens of an output."""


SMOKE = LongContextSize((0, 300), prompts=1, tokens=8)
QUICK = LongContextSize((2_000,), prompts=1, tokens=32)
FULL = LongContextSize((0, 2_000, 8_000, 20_000), prompts=12, tokens=64)


@dataclass(frozen=True)
class Answers:
    """Hold what the devices of all arms got for one prompt."""

    context: int
    prompt_id: str
    prompt: Sequence[int]
    """The context is a part of it."""
    setting: str
    completions: Mapping[str, Completion]
    """By arm."""

    @property
    def group(self) -> str:
        """Return what the text counts for: its setting or, if it repeats itself, that."""
        return APART if repetitive(self.completions[STREAMING].token_ids) else self.setting

    @property
    def sampling(self) -> ReferenceSampling:
        """Return the request's sampling as the reference takes it."""
        return ReferenceSampling(temperature=SETTINGS[self.setting], seed=SEED)


def scaled_pair(pair: Pair, folder: Path, trained: int) -> Pair:
    """Write copies of target and draft for POSITIONS to `folder`; the target's weights are links to the pair's own.

    trained: positions that YaRN stretches. Raises BadRequest for a target whose positions are scaled already.
    """
    between("trained", trained, 1, POSITIONS - 1)
    config = json.loads((pair.target / "config.json").read_text())
    rope = config["rope_parameters"]
    if rope["rope_type"] != "default":
        raise BadRequest(f"{pair.target} has positions of type {rope['rope_type']}, must be default", field="models")
    yarn = {"rope_type": "yarn", "factor": POSITIONS / trained, "original_max_position_embeddings": trained}
    config |= {"rope_parameters": {**rope, **yarn}, "max_position_embeddings": POSITIONS}
    target, draft = folder / "target", folder / pair.draft.name
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    for file in pair.target.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file.resolve())
    write_scaled_draft(pair.draft, draft, trained)
    return dataclasses.replace(pair, target=target, draft=draft, heads=None)


def write_scaled_draft(source: Path, path: Path, trained: int) -> None:
    """Write a copy of a GGUF file in which YaRN stretches `trained` positions to POSITIONS."""
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()
    written = ("general.architecture", f"{architecture}.context_length")
    writer = gguf.GGUFWriter(path, architecture)
    for one in reader.fields.values():
        if one.name not in written and not one.name.startswith("GGUF."):
            writer.add_key_value(one.name, one.contents(), one.types[0], sub_type=one.types[-1])
    writer.add_context_length(POSITIONS)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(POSITIONS / trained)
    writer.add_rope_scaling_orig_ctx_len(trained)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextlib.asynccontextmanager
async def devices(pair: Pair, coordinator: str) -> AsyncIterator[dict[str, AsyncClient]]:
    """Yield a client for each arm; those with a draft give it room for the longest context, whatever memory is free."""
    drafts = {STREAMING: None, DRAFT: pair.draft, NGRAM: "ngram", BOTH: pair.draft}
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for arm, draft in drafts.items():
            settings = EdgeSettings(draft_workers=1, draft_context=POSITIONS, ngram=arm != DRAFT)
            client = AsyncClient(coordinator=coordinator, draft=draft, timeout=None, settings=settings)
            clients[arm] = await stack.enter_async_context(client)
            await client.prepare()
        yield clients


async def begin(client: AsyncClient, prompt: Sequence[int], *, drafts: bool = False) -> tuple[float, float]:
    """Run a session until its first token and, where it drafts, its first proposal; return the seconds to both.

    Raises RuntimeError if there is no proposal within PATIENCE tokens.
    """
    stream = await client.stream(prompt, max_tokens=PATIENCE, ignore_eos=True, temperature=0.0)
    counts, proposed_s = stream.statistics, 0.0
    session = asyncio.create_task(stream.drain())
    while not session.done() and (counts.first_token_s is None or (drafts and not proposed_s)):
        await asyncio.sleep(POLL_S)
        if counts.drafted and not proposed_s:
            proposed_s = counts.clock() - counts.begun
    session.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await session
    if counts.first_token_s is None or (drafts and not proposed_s):
        raise RuntimeError(f"a device has proposed nothing: {counts.summary()}")
    return counts.first_token_s, proposed_s


async def read(clients: Mapping[str, AsyncClient], texts: LongPrompts, context: int) -> dict[str, float]:
    """Let verifier and devices read a context; return the seconds of the first requests.

    streaming_first_token, draft_first_token: to the first token, where neither side has read any of the context.
    draft_first_proposal: to the first nodes of that request with a draft. draft_reads: to the first nodes where only
    the verifier has read the context, so nearly the time that the draft takes for it.
    """
    (first,) = harness.prompts("tuning", 1)
    drafted_s, proposed_s = await begin(clients[DRAFT], texts.after(context, COLD, [first])[0], drafts=True)
    prompt = texts.after(context, WARM, [first])[0]
    streamed_s, _ = await begin(clients[STREAMING], prompt)
    _, reads_s = await begin(clients[DRAFT], prompt, drafts=True)
    await begin(clients[BOTH], prompt, drafts=True)
    await begin(clients[NGRAM], prompt)
    seconds = {
        "streaming_first_token": streamed_s,
        "draft_first_token": drafted_s,
        "draft_first_proposal": proposed_s,
        "draft_reads": reads_s,
    }
    return {name: round(value, 3) for name, value in seconds.items()}


async def ask(
    clients: Mapping[str, AsyncClient], texts: LongPrompts, context: int, prompts: Sequence[Prompt], tokens: int
) -> AsyncIterator[Answers]:
    """Send each prompt after the context with each setting and arm, whose order rotates."""
    for number, prompt in enumerate(texts.after(context, WARM, prompts)):
        for turn, (setting, temperature) in enumerate(SETTINGS.items(), number):
            options = Options(max_tokens=tokens, temperature=temperature, seed=SEED)
            got = {arm: await clients[arm].generate(prompt, **options) for arm in harness.rotated(ARMS, turn)}
            yield Answers(context, prompts[number].id, prompt, setting, got)


@dataclass
class Compared:
    """Hold the outputs that are not what they must be, by whether rounding explains it."""

    ties: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    def add(self, where: str, gap: float) -> None:
        """Count a difference. gap: how far the worse token lies below the best one, in perturbed scores."""
        kind, found = ("tie", self.ties) if gap <= TIE else ("MISMATCH", self.mismatches)
        found.append(where)
        print(f"{kind}: {where}, gap {gap:.2e}", flush=True)


def compare(answers: Sequence[Answers], reference: Reference, tokens: int) -> Compared:
    """Compare all outputs with plain streaming's, and the first of each context with the reference's forward."""
    compared, checked = Compared(), set[int]()
    for one in answers:
        where = f"{one.context} tokens before {one.prompt_id}, {one.setting}"
        streamed = one.completions[STREAMING].token_ids
        for arm, completion in one.completions.items():
            if completion.token_ids != streamed:
                gap = difference(reference, one, streamed, completion.token_ids)
                compared.add(f"{where}, {arm} and {STREAMING}", gap)
        if one.context not in checked:
            checked.add(one.context)
            for found in reference.differences(list(one.prompt), list(streamed), one.sampling, tokens):
                compared.add(f"{where}, {STREAMING} and the reference at token {found.position}", found.gap)
    return compared


def difference(reference: Reference, answers: Answers, streamed: Sequence[int], got: Sequence[int]) -> float:
    """Return how far the worse of the first two tokens that differ lies below the best one; inf where one ended."""
    at = next((i for i, (a, b) in enumerate(zip(streamed, got, strict=False)) if a != b), None)
    if at is None:
        return math.inf
    return reference.gap(list(answers.prompt), list(streamed[:at]), answers.sampling, (streamed[at], got[at]))


def agreement(pair: Pair, reference: Reference, tokens: Sequence[int]) -> float:
    """Return the share of positions of a text at which the draft's first choice is the target's.

    The draft is the GGUF file itself, in llama.cpp.
    """
    with torch.inference_mode():
        wanted = reference.model(input_ids=torch.tensor([tokens])).logits[0].argmax(-1).numpy()
    with LlamaModel.load(pair.draft) as model, TextContext(model, length=len(tokens)) as context:
        chosen = np.concatenate([logits.argmax(1) for logits in context.read(tokens)])
    return round(float((chosen == wanted).mean()), 3)


def figures(answers: Sequence[Answers]) -> dict[str, Any]:
    """Return what the answers of one context show: by arm and group, and the share of texts that repeat themselves.

    both_over_best: by setting, the speed of both sources over the best of the other arms.
    """
    groups = {group: [one for one in answers if one.group == group] for group in (*SETTINGS, APART)}
    arms = {arm: {group: arm_figures(some, arm) for group, some in groups.items()} for arm in ARMS}
    over = {setting: {arm: arms[arm][setting]["over_streaming"] for arm in ARMS} for setting in SETTINGS}
    return {
        "repetitive": round(len(groups[APART]) / len(answers), 3),
        "arms": arms,
        "both_over_best": {
            setting: round(speeds[BOTH] / max(speeds[arm] for arm in ARMS if arm != BOTH), 3)
            if None not in speeds.values()
            else None
            for setting, speeds in over.items()
        },
    }


def arm_figures(answers: Sequence[Answers], arm: str) -> dict[str, Any]:
    """Return the figures of one arm; None for what no text shows.

    first_accepted: share of the steps with nodes of the device that accepted at least one. over_streaming: tokens per
    second after the first delivery over plain streaming's. Times and rates are medians over texts.
    """
    counts = [one.completions[arm].statistics for one in answers]
    steps, with_nodes = sum(one.steps for one in counts), sum(sum(one.accepted_per_step) for one in counts)
    none_accepted = sum(sum(one.accepted_per_step[:1]) for one in counts)
    streamed = [one.completions[STREAMING].statistics.tokens_per_s for one in answers]
    rates = [(one.tokens_per_s, plain) for one, plain in zip(counts, streamed, strict=True)]
    return {
        "texts": len(counts),
        "tokens_per_step": round(sum(one.tokens for one in counts) / steps, 3) if steps else None,
        "first_accepted": round(1 - none_accepted / with_nodes, 3) if with_nodes else None,
        "tokens_per_s": median(rate for rate, _ in rates if rate),
        "over_streaming": median(rate / plain for rate, plain in rates if rate and plain),
        "first_token_s": median(one.first_token_s for one in counts if one.first_token_s is not None),
    }


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(statistics.median(found), 3) if found else None


def report(context: int, found: Mapping[str, Any]) -> None:
    """Print the figures of one context."""
    print(f"\n{context} tokens of context; {found['repetitive']:.0%} of the texts repeat themselves")
    print(
        "  first requests, s: " + ", ".join(f"{name} {value:.2f}" for name, value in found["first_request_s"].items())
    )
    for arm, groups in found["arms"].items():
        for group, row in groups.items():
            if row["texts"]:
                print(
                    f"  {arm:<12} {group:<10} " + ", ".join(f"{name} {value}" for name, value in row.items()),
                    flush=True,
                )


async def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments("long_context", __doc__)
    parser.add_argument(
        "--trained", type=int, default=TRAINED, metavar="N", help="positions that the pair was trained on (%(default)s)"
    )
    options = parser.parse_args(argv)
    size: LongContextSize = options.size.pick(smoke=SMOKE, quick=QUICK, full=FULL)
    pair = Pair.in_folder(options.models)
    prompts = harness.prompts("heldout", size.prompts)
    contexts: dict[str, Any] = {}
    answers: list[Answers] = []
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        copies = scaled_pair(pair, Path(scratch), options.trained)
        texts = LongPrompts(copies)
        async with harness.one_verifier(copies) as cluster, devices(copies, cluster.address) as clients:
            for context in size.contexts:
                seconds = await read(clients, texts, context)
                got = [one async for one in ask(clients, texts, context, prompts, size.tokens)]
                answers += got
                contexts[str(context)] = {"first_request_s": seconds, **figures(got)}
                report(context, contexts[str(context)])
        reference = Reference(str(copies.target))
        compared = compare(answers, reference, size.tokens)
        short = {
            "shipped": agreement(pair, Reference(str(pair.target)), texts.code[:SHORT]),
            "scaled": agreement(copies, reference, texts.code[:SHORT]),
        }
    print(f"\nfirst choices of the draft that are the target's, on {SHORT} tokens: {short}")
    result = {
        "positions": POSITIONS,
        "contexts": contexts,
        "short_agreement": short,
        "ties": len(compared.ties),
        "mismatches": len(compared.mismatches),
    }
    harness.finish(result, criteria(result), options.size)


def criteria(result: Mapping[str, Any]) -> list[Criterion]:
    """Return what must hold in a run of any size, and what drafts should gain behind each context."""
    short = result["short_agreement"]
    kept = short["scaled"] / short["shipped"] if short["shipped"] else None
    name = "agreement of draft and target on a short text, copies over the pair"
    return [
        Criterion.none(
            "outputs that are not plain streaming's or the reference's, ties left out", result["mismatches"]
        ),
        Criterion.bound(name, kept, at_least=LIKE_SHIPPED, enforced_from=Size.SMOKE),
        *(
            Criterion.bound(
                f"{context} tokens of context, {setting}, both sources over the best of one of them and streaming",
                ratio,
                at_least=PAYS,
                enforced_from=None,
            )
            for context, found in result["contexts"].items()
            for setting, ratio in found["both_over_best"].items()
        ),
    ]


if __name__ == "__main__":
    asyncio.run(main())
