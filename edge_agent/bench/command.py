"""Run `outrider-edge bench`, which measures a running cluster with drafts and without."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import secrets
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, SecretStr, TypeAdapter, ValidationError

from edge_agent.config import EdgeSettings
from outrider import __version__
from outrider.core.errors import BadRequest
from outrider.core.text import counted

if TYPE_CHECKING:  # importing them takes long, and help does without
    from edge_agent.bench.measure import Configuration, Plan
    from edge_agent.bench.users import PromptInput
    from edge_agent.prompts import Prompt
    from edge_agent.sdk.client import AsyncClient
    from edge_agent.target.bundle import TargetBundle

COUNT, TOKENS = 16, 128
LONG = 1024
"""Tokens of the prompt by which it is said how fast prompts are read."""
_Users = Annotated[int, Field(ge=1, le=256)]
_RttMs = Annotated[float, Field(ge=0.0, le=10_000.0)]
_Count = Annotated[int, Field(ge=1, le=100_000)]
_Tokens = Annotated[int, Field(ge=2, le=100_000)]
_Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
STDOUT = "-"
_IDENTITY = ("name", "dtype", "backend", "hardware")
"""What is reported of the target."""
PROMPTS = "benchmarks/prompts.jsonl"
"""Our prompts, beside the code of a clone of the repository, and in an installed package's folder."""


def add_options(group: Any) -> None:
    def add(flag: str, kind: Any, default: Any, metavar: str, text: str) -> None:
        text = f"{text} [default: {default}]"
        group.add_argument(flag, type=_read_as(kind), default=str(default), metavar=metavar, help=text)

    group.add_argument("--model", metavar="NAME", help="name of the target, as --target")
    add("--concurrency", _several(_Users), "1,4", "N,...", "numbers of users at the same time")
    add("--rtt-ms", _several(_RttMs), "0", "MS,...", "round trips to add to the real one, emulated")
    text = "prompts in our own format or that of Spec-Bench, MT-bench, HumanEval, GSM8K or ShareGPT [default: our own]"
    group.add_argument("--prompts", type=Path, metavar="FILE", help=text)
    add("--count", _Count, COUNT, "N", "take so many of them, the categories in turn")
    add("--max-tokens", _Tokens, TOKENS, "N", "generate so many tokens at most for each")
    add("--temperature", _Temperature, 0.0, "X", "0 is greedy, 1 the target's own distribution")
    text = "write the result as JSON to FILE, too; without FILE print it instead of the tables"
    group.add_argument("--json", nargs="?", const=STDOUT, type=_file, metavar="FILE", help=text)


def _file(text: str) -> str:
    """Return the name of a file whose folder is there, before much is measured that could not be written."""
    if not Path(text).absolute().parent.is_dir() or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text!r}")
    return text


def _read_as(kind: Any) -> Callable[[str], Any]:
    """Return what reads an option's value as a type that pydantic checks."""
    adapter = TypeAdapter(kind)

    def read(text: str) -> Any:
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            must = re.sub(r"^\w+ should ", "must ", error.errors()[0]["msg"])
            raise argparse.ArgumentTypeError(f"{must}, got {text!r}") from None

    return read


def _several(kind: Any) -> Any:
    """Return the type of some values between commas, each of them once."""
    return Annotated[list[kind], BeforeValidator(lambda text: list(dict.fromkeys(text.split(","))))]


async def bench(settings: EdgeSettings, args: argparse.Namespace) -> None:
    """Measure, and print what was measured, also if it is interrupted. Raises core errors."""
    from edge_agent.bench.measure import Plan, run_plan
    from edge_agent.bench.users import Users
    from edge_agent.sdk.client import AsyncClient

    if any(args.rtt_ms) and (settings.tls_ca or settings.tls_cert):
        raise BadRequest(
            "--rtt-ms leads through a proxy of this machine, for which the cluster's certificate is not made: measure"
            " from where your users are, or a cluster without TLS",
            field="rtt_ms",
        )
    if args.model:
        settings = settings.model_copy(update={"target": args.model})
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": 0}
    async with AsyncClient(draft=None, settings=settings) as client:
        bundle = await client.prepare()
        prompts, too_long = _chosen(bundle, args)
        common = Users(
            _given(settings),
            [prompt.turns for prompt in (prompts[0], *prompts)],
            draft=None if settings.draft in ("", "none") else settings.draft,
            options=options,
            read=True,
        )
        plan = Plan(common, args.concurrency, args.rtt_ms, sorted(os.sched_getaffinity(0)))
        new_s = [await _first_token_s(client, (f"{secrets.token_hex(4)}: {one.turns[0]}",)) for one in prompts[:COUNT]]
        long = _long_prompt(bundle, prompts)
        long_s = await _first_token_s(client, long)
    measured: list[Configuration] = []
    whole = False
    try:
        await run_plan(plan, measured, say)
        whole = True
    finally:
        if not measured:
            say("nothing was measured yet")
        else:
            document = _document(plan, bundle, prompts, measured) | {
                "whole": whole,
                "too_long": too_long,
                "cluster": settings.coordinator or settings.verifier,
                "new_prompt_first_token_ms": round(1e3 * statistics.median(new_s), 1),
                "long_prompt": {"tokens": len(long), "tokens_per_s": round(len(long) / long_s, 1)},
            }
            _publish(document, args.json)


def _document(
    plan: Plan, bundle: TargetBundle, prompts: Sequence[Prompt], measured: Sequence[Configuration]
) -> dict[str, Any]:
    """Return what was measured, as JSON has it."""
    from edge_agent.bench.report import by_category, rows, texts

    categories = [prompt.category for prompt in prompts]
    names = {text.draft: None for one in measured for text in texts(one.drafted) if text.draft}
    ngrams = ["n-grams"] if names.keys() - {"ngram"} else []
    return {
        "outrider": __version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "target": {name: getattr(bundle.description.target, name) for name in _IDENTITY},
        "device_drafts": [*names, *ngrams],
        "cpus": len(plan.cores),
        "prompts": dict(Counter(categories)),
        "max_tokens": plan.common.options["max_tokens"],
        "temperature": plan.common.options["temperature"],
        "rows": rows(measured),
        "categories": by_category(measured, categories),
    }


def _publish(document: Mapping[str, Any], file: str | None) -> None:
    """Print the result, and write it to the file if there is one."""
    from edge_agent.bench.report import described

    as_json = json.dumps(document, indent=1)
    if file not in (None, STDOUT):
        Path(file).write_text(f"{as_json}\n")
    print(as_json if file == STDOUT else described(document), flush=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _given(settings: EdgeSettings) -> dict[str, Any]:
    """Return the settings as JSON, with secrets."""
    hidden = {
        name: value for name in EdgeSettings.model_fields if isinstance(value := getattr(settings, name), SecretStr)
    }
    return settings.model_dump(mode="json") | {name: value.get_secret_value() for name, value in hidden.items()}


def _chosen(bundle: TargetBundle, args: argparse.Namespace) -> tuple[list[Prompt], int]:
    """Return the prompts that are run, and how many were left out that the target cannot hold. Raises BadRequest."""
    from edge_agent.prompts import mixed, read_prompts

    file = args.prompts or _our_prompts()
    found: list[Prompt] = []
    too_long = 0
    for prompt in mixed(read_prompts(file)):
        if len(found) == args.count:
            break
        if _fits(bundle, prompt, args.max_tokens):
            found.append(prompt)
        else:
            too_long += 1
    if too_long:
        say(f"{counted(too_long, 'prompt')} of {file.name} left out: the target cannot hold them with their answers")
    if not found:
        raise BadRequest(
            f"{file}: no prompt fits the target's {bundle.description.max_sequence} tokens with answers of"
            f" {args.max_tokens}",
            field="prompts",
        )
    return found, too_long


def _our_prompts() -> Path:
    """Return the file of our prompts. Raises BadRequest if this installation has none."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package, package.parent):
        if (file := folder / PROMPTS).is_file():
            return file
    raise BadRequest("this installation has no prompts of ours: give --prompts FILE", field="prompts")


def _fits(bundle: TargetBundle, prompt: Prompt, max_tokens: int) -> bool:
    said: list[dict[str, str]] = []
    for turn in prompt.turns:
        said += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
    try:
        if bundle.template is None:
            ids = bundle.encode_prompt("\n\n".join(prompt.turns))
        else:
            ids = bundle.encode_chat(said[:-1])
    except BadRequest:  # it is too long to be looked at
        return False
    return len(ids) + max_tokens * len(prompt.turns) <= bundle.description.max_sequence


def _long_prompt(bundle: TargetBundle, prompts: Sequence[Prompt]) -> list[int]:
    """Return LONG tokens of the prompts, or as many as they and the target have, new to the verifier."""
    text = "\n".join(itertools.islice(itertools.cycle(turn for prompt in prompts for turn in prompt.turns), LONG // 4))
    ids = bundle.encode_prompt(f"{secrets.token_hex(4)}: {text}"[: 8 * LONG])
    return ids[: min(LONG, bundle.description.max_sequence // 2)]


async def _first_token_s(client: AsyncClient, new: PromptInput) -> float:
    """Return the time to the first token of a prompt that is new to the verifier."""
    from edge_agent.bench.users import User, Users

    [first] = await User(Users({}, [new], options={"max_tokens": 1}, warm=0), 0, client).run(iter([0]), None)
    return first.first_token_s
