"""Compare the losses that a draft can learn by: forward KL, total variation and the hybrid, which learns by LoRA too.

The target answers questions, and writes code as before; the narrow draft, which knows only code, learns from these
texts, with their prompts as context that is not learnt from. Every run sees the same texts for as many steps; the
hybrid begins with KL for half of them, as in the loop, and total variation stands alone. Measured is the quantised
file in llama.cpp, on prompts that nobody learnt from and that no result is measured on either: tokens per step of the
target with a chain of 6 draft tokens, and acceptance of the first one, on texts that the target writes greedily and at
temperature 0.8. `arithmetic` and `code` leave out texts that repeat themselves, which any draft guesses; those, and
greedy and sampled ones, are also told apart.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from benchmarks import acceptance
from benchmarks.acceptance import DraftAcceptance, TargetText
from benchmarks.support import harness, questions
from benchmarks.support.harness import Pair
from benchmarks.support.texts import grouped
from cloud_verifier.distill.data.dataset import build
from cloud_verifier.distill.data.plan import DatasetPlan
from cloud_verifier.distill.gguf.writer import check_types, write_gguf
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.distill.training.ranks import Ranks
from cloud_verifier.traffic.passage import Passage
from models.recipe.generate import END_ID, continue_prompts
from outrider.llama.model import quantize

ROWS = 64
"""Prompts that the target continues at a time."""
Loss = Literal["kl", "tv", "hybrid"]
TEMPERATURES = (0.0, 0.9)
KINDS = ("arithmetic", "code")
SAMPLINGS = {"greedy": 0.0, "sampled": 0.8}
"""Sampling of the texts that are measured -> its temperature."""


@dataclass(frozen=True)
class LossesSize:
    prompts: dict[str, int]
    steps: int
    heldout: int
    """Held-out prompts of each kind."""
    runs: tuple[tuple[Loss, int], ...] = (("kl", 0), ("tv", 0), ("hybrid", 0), ("hybrid", 16))
    """Loss and rank of LoRA of each run; 0 trains all weights."""
    length: int = 128
    """Most tokens that the target writes after each prompt."""
    batch_tokens: int = 2_048
    """Tokens of a step."""
    threads: int = 2


RATES = {False: 3e-3, True: 1e-2}
"""Whether with LoRA -> learning rate."""
FULL = LossesSize({"arithmetic": 1536, "code": 768}, 120, 22)
QUICK = LossesSize({"arithmetic": 32, "code": 16}, 4, 2, length=64, batch_tokens=512, threads=1)
SMOKE = LossesSize({"arithmetic": 4, "code": 4}, 1, 1, length=16, batch_tokens=512, threads=1)


class MemoryLog:
    """Provide the traffic as a log that is read from memory."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages

    def read(self, since_unix: float = 0.0, now: float | None = None, *, whole: bool = True) -> Iterator[Passage]:
        return iter(self._passages)


def main(argv: Sequence[str] | None = None) -> None:
    options = harness.arguments("distill_losses", __doc__).parse_args(argv)
    pair = Pair.in_folder(options.models)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outrider-distill-losses-") as scratch:
        result = run(pair, options.size.pick(smoke=SMOKE, quick=QUICK, full=FULL), Path(scratch))
    harness.finish(result | {"minutes": round((time.monotonic() - began) / 60, 1)})


def run(pair: Pair, scale: LossesSize, folder: Path) -> dict[str, Any]:
    """Write the traffic, train every variant on it and measure all of them."""
    torch.set_num_threads(scale.threads)
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=Ranks("cpu").dtype("auto")).eval()
    made = {"arithmetic": questions.arithmetic, "code": questions.code}
    passages = [
        one
        for kind in KINDS
        for one in write(target, tokenizer, kind, made[kind](scale.prompts[kind], 1), scale.length)
    ]
    card = build(
        MemoryLog(passages),  # type: ignore[arg-type]
        folder / "dataset",
        DatasetPlan(fresh_since_unix=1.0),
        now=2.0,
    )
    print(f"learnt from: {card.train}; left out: {card.left_out}", flush=True)
    samples = [sample for kind in KINDS for sample in measured_texts(target, tokenizer, kind, scale)]
    del target
    drafts = {"before": pair.narrow, "reference": pair.draft}
    measured = {name: acceptance.measure(path, samples) for name, path in drafts.items()}
    print(
        f"{'':12}{'lora':>6}{'tokens/step':>13}{'acceptance':>12}{'code':>8}{'acceptance':>12}{'gap closed':>12}"
        f"{'code lost':>11}{'seconds':>9}"
    )
    for name, found in measured.items():
        show(name, "", found, measured, "")
    runs = []
    for loss, rank in scale.runs:
        seconds = train(pair, scale, folder, loss, rank)
        found = acceptance.measure(folder / f"{loss}-{rank}" / "draft.gguf", samples)
        show(loss, str(rank or "-"), found, measured, f"{seconds:.0f}")
        runs.append(
            {"loss": loss, "lora_rank": rank, "seconds": round(seconds, 1)} | compared(found, measured) | rounded(found)
        )
    return {name: rounded(found) for name, found in measured.items()} | {"runs": runs, "tokens": card.train_tokens}


def write(
    target: Any, tokenizer: PreTrainedTokenizerFast, kind: str, texts: Sequence[str], length: int
) -> Iterator[Passage]:
    """Let the target write after prompts, half of them greedily. The questions are fresh traffic, the code is old."""
    for number, (rows, batch) in enumerate(batches(tokenizer, texts)):
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        tokens, top_ids, top_log_probs = continue_prompts(target, batch, length, temperature, seed=number)
        written = tokens[:, batch.shape[1] :].numpy().astype(np.int32)
        for row, prompt in enumerate(rows):
            count = until_end(written[row])
            log_probs = top_log_probs[row, :count].numpy()
            yield Passage(
                session_id=f"{kind}-{number}-{row}",
                tenant="",
                traffic_class=kind,
                draft_release="",
                weights_hash="target",
                start=0,
                tokens=written[row, :count],
                top_ids=top_ids[row, :count].numpy().astype(np.int32),
                top_log_probs=log_probs,
                tail=np.clip(1 - np.exp(log_probs).sum(1), 0, 1),
                proposed_depths=np.zeros(count, np.uint8),
                temperature=temperature,
                time_unix=1.0 if kind == "arithmetic" else 0.0,
                expires_unix=3.0,
                prompt=np.array(prompt, np.int32),
            )


def measured_texts(
    target: Any, tokenizer: PreTrainedTokenizerFast, kind: str, scale: LossesSize
) -> Iterator[TargetText]:
    """Yield what the target writes after prompts for tuning, greedily and sampled, 96 tokens or less."""
    for prompt in [one.text for one in harness.prompts("tuning") if one.kind == kind][: scale.heldout]:
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        for sampling, temperature in SAMPLINGS.items():
            tokens, _, _ = continue_prompts(target, np.array([ids]), min(96, scale.length), temperature, seed=0)
            written = tokens[0, len(ids) :].numpy()
            text = written[: until_end(written)].tolist()
            yield TargetText(grouped(kind, sampling, text), ids, text)


def batches(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Iterator[tuple[list[list[int]], np.ndarray]]:
    """Yield batches of prompts of about equal length: their token ids, and the rows padded on the left with END_ID."""
    heads = sorted((tokenizer(text, add_special_tokens=False)["input_ids"][-256:] for text in texts), key=len)
    for start in range(0, len(heads), ROWS):
        some = heads[start : start + ROWS]
        batch = np.full((len(some), len(some[-1])), END_ID, np.int64)
        for row, head in zip(batch, some, strict=True):
            row[len(row) - len(head) :] = head
        yield some, batch


def until_end(written: np.ndarray) -> int:
    """Return the number of tokens up to and including the first end of text."""
    ends = np.flatnonzero(written == END_ID)
    return int(ends[0]) + 1 if len(ends) else len(written)


def train(pair: Pair, scale: LossesSize, folder: Path, loss: Loss, rank: int) -> float:
    """Train one variant by the trainer's own command, and export it. Returns the seconds that the training took."""
    run = folder / f"{loss}-{rank}"
    TrainingPlan(
        base=pair.narrow,
        tokenizer=pair.target,
        dataset=folder / "dataset",
        loss=loss,
        kl_share=0.0 if loss == "tv" else 0.5,
        lora_rank=rank,
        steps=scale.steps,
        learning_rate=RATES[rank > 0],
        batch_tokens=scale.batch_tokens,
        threads=scale.threads,
    ).write(run)
    command = [sys.executable, "-m", "cloud_verifier.distill.training.run", str(run)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        raise RuntimeError(f"training by {loss} with rank {rank} failed: {ran.stderr[-2000:]}")
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    write_gguf(model, AutoTokenizer.from_pretrained(run / "model"), run / "whole.gguf", "draft")
    quantize(run / "whole.gguf", run / "draft.gguf", "Q8_0", threads=scale.threads)
    check_types(run / "draft.gguf", "Q8_0")
    return float(json.loads((run / "done.json").read_text(encoding="utf-8"))["seconds"])


def compared(
    found: dict[str, DraftAcceptance], others: dict[str, dict[str, DraftAcceptance]]
) -> dict[str, float | None]:
    """Return how much of the gap between the drafts is closed, and how much acceptance on code is lost.

    They are None if all texts of a kind repeat themselves, as they may in a run of few.
    """
    before, reference = others["before"], others["reference"]
    if not {*KINDS} <= found.keys():
        return {"gap_closed": None, "code_loss": None}
    gap = reference["arithmetic"].tokens_per_step - before["arithmetic"].tokens_per_step
    won = found["arithmetic"].tokens_per_step - before["arithmetic"].tokens_per_step
    lost = 1 - found["code"].tokens_per_step / before["code"].tokens_per_step
    return {"gap_closed": round(won / gap, 3), "code_loss": round(lost, 3)}


def rounded(found: dict[str, DraftAcceptance]) -> dict[str, Any]:
    return {kind: {name: round(value, 3) for name, value in asdict(one).items()} for kind, one in found.items()}


def show(name: str, lora: str, found: dict[str, DraftAcceptance], others: Any, seconds: str) -> None:
    share = compared(found, others)
    closed, lost = ("-" if share[key] is None else f"{share[key]:.1%}" for key in ("gap_closed", "code_loss"))
    figures = "".join(
        f"{found[kind].tokens_per_step:{width}.3f}{found[kind].greedy:12.3f}"
        if kind in found
        else f"{'-':>{width}}{'-':>12}"
        for kind, width in zip(KINDS, (13, 8), strict=True)
    )
    print(f"{name:12}{lora:>6}{figures}{closed:>12}{lost:>11}{seconds:>9}", flush=True)


if __name__ == "__main__":
    main()
