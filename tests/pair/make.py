"""Make the drafts and heads of the tests' pair from its target, in some minutes: PYTHONPATH=. python tests/pair/make.py

`draft.gguf` is the target with noise in its weights, `heads.safetensors` an EAGLE layer that our own trainer trains on
what the target writes after code and sums.
"""

from __future__ import annotations

import logging
import random
import shutil
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from cloud_verifier.distill.gguf_files import export
from cloud_verifier.distill.run_folder import HEADS, MODEL
from cloud_verifier.distill.texts import TRAIN, VALIDATION, Text, save_texts
from cloud_verifier.distill.training import trainer
from cloud_verifier.distill.training.plan import TrainingPlan

PAIR = Path(__file__).parent
TARGET = PAIR / "target"
NOISE = 0.25
"""Standard deviation of a matrix's noise, as a share of that of its weights."""
PROMPT, WRITTEN, ROWS, BATCHES = 24, 128, 64, 32
"""Tokens of a prompt and of what follows it, texts of a batch, and batches."""
TEMPERATURES = (0.0, 0.9)
TOP = 64
STEPS = 1_500


def load() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)


def make_draft(work: Path) -> None:
    """Write the target with noise as Q8_0."""
    model, noise = load(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += NOISE * weight.std() * torch.randn(weight.shape, generator=noise)
    model.save_pretrained(work / "draft")
    print(export(work / "draft", TARGET, PAIR / "draft.gguf"))


def prompts() -> Tensor:
    """Return prompts `[n, PROMPT]`: beginnings of lines of the standard library, and of sums."""
    chance, tokenizer = random.Random(0), AutoTokenizer.from_pretrained(TARGET)
    code = [path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))]
    rows: list[list[int]] = []
    while len(rows) < ROWS * BATCHES:
        if chance.random() < 0.6:
            lines = chance.choice(code).splitlines(keepends=True)
            text = "".join(lines[chance.randrange(len(lines)) :][:40])
        else:
            name, thing = chance.choice(("Ada", "Ben", "A baker", "Tom")), chance.choice(("apples", "books", "eggs"))
            a, b = chance.randint(2, 60), chance.randint(2, 60)
            text = f"Question: {name} has {a} {thing} and buys {b} more. How many {thing} are there now?\nAnswer: There"
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= PROMPT:
            rows.append(ids[:PROMPT])
    return torch.tensor(rows)


@torch.no_grad()
def texts() -> list[Text]:
    """Return what the target writes, with its distribution at every position."""
    model, found = load(), []
    torch.manual_seed(0)
    for number, batch in enumerate(prompts().split(ROWS)):
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        lengths = {"min_new_tokens": WRITTEN, "max_new_tokens": WRITTEN}
        tokens = model.generate(batch, attention_mask=torch.ones_like(batch), **lengths, **sampling)
        for row, log_probs in zip(tokens, model(tokens).logits.log_softmax(-1), strict=True):
            top = log_probs.topk(TOP)
            ids, values = (torch.cat((one[:1], one[:-1])) for one in (top.indices, top.values))  # of each token itself
            tail = (1 - values.exp().sum(1)).clamp(0)
            arrays = (row.int().numpy(), ids.int().numpy(), values.numpy(), tail.numpy())
            found.append(Text("", *arrays, first=PROMPT))
    return found


def make_heads(work: Path) -> None:
    """Train heads on the target's own texts."""
    made = texts()
    save_texts(work / "dataset" / TRAIN, [text for number, text in enumerate(made) if number % 32])
    save_texts(work / "dataset" / VALIDATION, made[::32])
    TrainingPlan(
        base=TARGET,
        tokenizer=TARGET,
        dataset=work / "dataset",
        heads={"kind": "eagle", "width": 128},
        steps=STEPS,
        batch_tokens=1_024,
        measure_steps=200,
        precision="float32",
    ).write(work / "heads")
    trainer.train(work / "heads")
    print((work / "heads" / "done.json").read_text())
    shutil.copy(work / "heads" / MODEL / HEADS, PAIR / HEADS)


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    with tempfile.TemporaryDirectory() as folder:
        make_draft(Path(folder))
        make_heads(Path(folder))
