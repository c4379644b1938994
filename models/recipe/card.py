"""The model card, rendered from what was measured."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from typing import Any

from models.recipe.settings import VOCAB_SIZE, Job, ModelShape

_TEMPLATE = """# The demo pair

A small target, two drafts and heads on the target, which show Outrider at work on any machine. They are trained from
nothing by the recipe in `models/recipe`, on a CPU, in {hours:.1f} hours. The text looks like Python and like worked
arithmetic; the code does not do what its docstring says and most sums are wrong. Use them to see the system run, not
for answers.

| file | what | parameters |
|---|---|---|
| `target/` | the target: Qwen3 architecture, bf16 safetensors, tokenizer, chat template | {target_parameters} |
| `draft.gguf` | its draft, Q8_0, distilled from the target's own text | {draft_parameters} |
| `draft-narrow.gguf` | a draft that saw code only: bad at arithmetic on purpose, to show what distillation mends | \
{draft_parameters} |
| `heads.safetensors` | an EAGLE-style layer on the target's hidden states, for verifiers (`--heads`) | 1.2M |

All three share one byte-level BPE tokenizer of 8,192 tokens, split as llama.cpp's `qwen2` pre-tokenizer does:
{mismatches} of {probes:,} probe strings are tokenised differently by llama.cpp and transformers.
Context: 2,048 positions, trained on windows of up to 1,024. Prompts are raw Python, `Question: ...\\nAnswer:`, or a
chat (`<|user|>...<|end|><|assistant|>`, by the chat template).

## Data

| text | documents | bytes | licence |
|---|---|---|---|
{data_rows}

The standard library is that of CPython {python}, as installed. Of GSM8K only the training questions are used, with the
calculator annotations taken out. About 3% of the files and questions are held out by a hash of their name, in every
form. The weights are released under this repository's licence, Apache-2.0. Python's sources are copyright of the Python
Software Foundation, GSM8K (Cobbe et al., arXiv 2110.14168) of OpenAI.

## Training

| model | from | steps | tokens | hours |
|---|---|---|---|---|
{training_rows}

The target is trained with Muon (hidden matrices) and AdamW (the rest), bf16 autocast, {batch:,} tokens a step; warm-up,
constant rate, linear decay. Each draft begins on the same kind of text and is then distilled on what the target wrote
after training prompts, half greedy and half at temperature 0.9 ({generated} tokens; the narrow draft sees only what
follows code): forward KL on the target's 64 likeliest tokens and the rest as one, then the acceptance-seeking hybrid of
arXiv 2602.23881.

The heads are trained by the distillation loop's trainer (`outrider-distill`, `student = "heads"`) on the same text, for
the first three tokens ahead. Their mean overlap, sum min(p, q), on validation text at temperature 1 is
{heads_overlap:.3f}.

## Held-out bits per byte

| model | code | arithmetic | chat |
|---|---|---|---|
{bits_rows}

The 5-gram model has modified Kneser-Ney smoothing and saw every token that the target may see.

## Acceptance

Measured with the quantised files on the 65 held-out prompts of `benchmarks/prompts`, {tokens} tokens each. *Greedy*:
how often the draft's first choice is the target's, on the target's greedy text. *Tokens per step*: on that text, with a
chain of {chain} draft tokens per target step. *Sampled*: the mean of `sum min(p, q)` at temperature {temperature}.

| draft | class | greedy | tokens per step | sampled |
|---|---|---|---|---|
{acceptance_rows}

{repetitive:.0%} of the greedy texts repeat more than 30% of their 4-grams; a repetition is easy to guess, so benchmarks
leave such texts out or say how many there are.

## Limits

Trained on little text and for a short time: it knows no facts, cannot calculate, follows requests only in form, and may
reproduce lines of the standard library. English and Python only. No safety training of any kind.

## Samples

{samples}
## Make it again

```
python -m models.recipe run --data DIR --work DIR
python -m models.recipe publish --work DIR
```

Heads alone, for the target that is here: `python -m models.recipe heads --data DIR --work DIR`.

`DIR` of `--data` holds `gsm8k_train.jsonl` (github.com/openai/grade-school-math). Every stage can be interrupted and
goes on where it stopped. Time, not steps, drives the schedule: a faster machine sees more text and gives better models.
With a GPU: `--device cuda`, and `--scale large` for a target of 107M parameters, too large to be published here.
"""

_SOURCES = {
    "code": "Python standard library, files",
    "tests": "Python standard library, its test suite",
    "chat_code": "Python standard library, functions as chat",
    "math": "GSM8K training questions, worked",
    "chat_math": "GSM8K training questions as chat",
}
_TRAINED = {
    "target": ("target", "nothing"),
    "warm": ("draft, first on text", "nothing"),
    "draft": ("draft, distilled", "the one above"),
    "warm-narrow": ("draft-narrow, first on text", "nothing"),
    "draft-narrow": ("draft-narrow, distilled", "the one above"),
    "heads": ("heads", "nothing"),
}
"""By stage: what it makes, and from what."""


def render(job: Job, results: dict[str, Any]) -> str:
    """Return the card's Markdown from the stages' records and the evaluation's results."""
    return _TEMPLATE.format(
        target_parameters=_parameters(job.scale.target),
        draft_parameters=_parameters(job.scale.draft),
        python=platform.python_version(),
        data_rows=_data_rows(job),
        training_rows=_training_rows(job),
        hours=sum(_done(job, stage)["seconds"] for stage in (*_TRAINED, "generate")) / 3600,
        batch=job.scale.target_plan.batch_tokens,
        generated=f"{_done(job, 'generate')['tokens']:,}",
        bits_rows=_rows(
            [name, *(f"{value:.3f}" for value in row.values())] for name, row in results["bits_per_byte"].items()
        ),
        acceptance_rows=_rows(
            [f"`{name}`", label, *(f"{row[key]:.3f}" for key in ("greedy", "tokens_per_step", "sampled"))]
            for name, classes in results["acceptance"].items()
            for label, row in classes.items()
        ),
        samples="".join(_sample(item) for item in results["samples"]),
        repetitive=results["repetitive"],
        heads_overlap=_done(job, "heads")["validation_overlap"]["best"],
        tokens=results["text_tokens"],
        chain=results["chain"],
        temperature=results["temperature"],
        **results["tokenizer"],
    )


def _parameters(shape: ModelShape) -> str:
    attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.ffn
    return f"{(VOCAB_SIZE * shape.hidden + shape.layers * layer) / 1e6:.1f}M"


def _data_rows(job: Job) -> str:
    sizes, counts = _done(job, "corpus")["bytes"], _done(job, "corpus")["documents"]
    return _rows(
        [text, f"{counts[f'{kind}/train']:,}", f"{sizes[f'{kind}/train']:,}", "MIT" if "math" in kind else "PSF-2.0"]
        for kind, text in _SOURCES.items()
    )


def _training_rows(job: Job) -> str:
    rows = []
    for stage, (name, origin) in _TRAINED.items():
        done = _done(job, stage)
        rows.append([name, origin, f"{done['step']:,}", f"{done['tokens']:,}", f"{done['seconds'] / 3600:.2f}"])
    return _rows(rows)


def _sample(item: dict[str, str]) -> str:
    # Four backticks, since the text itself may hold a fence of three.
    return f"{item['kind']}, {item['how']}:\n\n````text\n{item['prompt']}⏵{item['text'].rstrip()}\n````\n\n"


def _rows(rows: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _done(job: Job, stage: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((job.stage(stage) / "done.json").read_text(encoding="utf-8"))
    return record
