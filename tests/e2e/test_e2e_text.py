"""Test a device's output against plain streaming and against Hugging Face."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from delay_proxy import DelayProxy
from target_reference import TargetReference
from transformers import AutoTokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

CODE = 'def read_lines(path):\n    """Return the lines of a file."""\n'
SUM = "Question: A baker fills 6 trays with 12 rolls each and sells 40 of them. How many rolls are left?\nAnswer:"
TOKENS = 40
GREEDY: dict[str, float] = {}
SAMPLED = {
    "temperature": 0.8,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "seed": 7,
}


@pytest.fixture(scope="module")
def reference(pair) -> TargetReference:
    return TargetReference(str(pair[0]))


@pytest.fixture(scope="module")
def tokenizer(pair):
    return AutoTokenizer.from_pretrained(pair[0])


@pytest.mark.parametrize("prompt", [CODE, SUM], ids=["code", "sum"])
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_text_is_the_targets_own_with_a_draft_and_without(system, device, reference, tokenizer, prompt, settings):
    options = {"max_tokens": TOKENS, **settings}
    drafted = await device.run(system.here, prompt, **options)
    streamed = await device.run({**system.here, "draft": None}, prompt, **options)
    repeated = await device.run({**system.here, "draft": "ngram"}, prompt, **options)
    assert drafted["draft"] != ""
    assert streamed["draft"] == ""
    assert streamed["evaluated"] == 0  # the verifier's own nodes may have saved steps, and count for no device
    assert streamed["steps"] <= len(streamed["tokens"])
    assert drafted["tokens"] == streamed["tokens"] == repeated["tokens"]
    assert drafted["text"] == tokenizer.decode(drafted["tokens"], skip_special_tokens=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert reference.mismatches(ids, drafted["tokens"], settings, TOKENS) == []


async def test_the_draft_saves_steps(system, device):
    # Sampled, since of a text that repeats itself the verifier's own sources may draft all before the device does.
    drafted = await device.run(system.here, CODE, max_tokens=300, temperature=1.0, seed=7, ignore_eos=True)
    assert drafted["accepted"] > 0
    assert drafted["steps"] < len(drafted["tokens"]) == 300
    assert drafted["draft_failure"] == ""


async def test_the_device_never_loaded_torch_transformers_or_redis(system, device):
    await device.run(system.here, CODE, max_tokens=4)
    assert (await device.run({}, None, do="modules"))["loaded"] == []


async def test_a_seed_reproduces_and_is_reported_where_it_was_drawn(system, device):
    options = {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    first = await device.run(system.here, CODE, **options)
    again = await device.run(system.here, CODE, **options, seed=first["seed"])
    other = await device.run(system.here, CODE, **options)
    assert first["tokens"] == again["tokens"]
    assert other["seed"] != first["seed"]
    assert other["tokens"] != first["tokens"]


async def test_equal_seeds_on_different_prompts_do_not_correlate(system, device):
    """At temperature 100 the noise alone decides: shared noise would give the same tokens."""
    options = {"max_tokens": TOKENS, "temperature": 100.0, "seed": 5, "ignore_eos": True}
    one = await device.run(system.here, CODE, **options)
    two = await device.run(system.here, SUM, **options)
    assert sum(a == b for a, b in zip(one["tokens"], two["tokens"], strict=True)) < TOKENS / 4


async def test_a_stop_string_ends_the_text_before_it_wherever_it_falls(system, device):
    whole = await device.run(system.here, CODE, max_tokens=80, ignore_eos=True)
    text = whole["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    stopped = await device.run(system.here, CODE, max_tokens=80, ignore_eos=True, stop=stop)
    assert stopped["finish"] == "stop"
    assert stopped["text"] == text[: text.index(stop)]
    assert len(stopped["tokens"]) < 80


async def test_chat_uses_the_targets_template(system, device, reference, tokenizer):
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    answer = await device.run(system.here, messages, do="chat", max_tokens=TOKENS)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert answer["prompt_tokens"] == len(ids)
    assert reference.mismatches(ids, answer["tokens"], GREEDY, TOKENS) == []


async def test_sessions_side_by_side_do_not_touch_one_another(system, device):
    prompts = [CODE, SUM, "import os\n", "class Stack:\n", "Question: 7 + 8?\nAnswer:"]
    options = {"max_tokens": TOKENS, **SAMPLED}
    alone = [await device.run(system.here, prompt, **options) for prompt in prompts]
    together = await asyncio.gather(*(device.run(system.here, prompt, **options) for prompt in prompts))
    assert [r["tokens"] for r in together] == [r["tokens"] for r in alone]


async def test_a_long_way_changes_nothing_but_the_time(settled, device):
    options = {"max_tokens": TOKENS, **SAMPLED}
    near = await device.run(settled.here, CODE, **options)
    async with contextlib.AsyncExitStack() as stack:
        reroute = {}
        for verifier in settled.cluster.verifiers:
            proxy = await stack.enter_async_context(DelayProxy(verifier.address, 30.0))
            reroute[verifier.address] = proxy.address
        far = await device.run({**settled.here, "reroute": reroute}, CODE, **options)
        streamed = await device.run({**settled.here, "reroute": reroute, "draft": None}, CODE, **options)
    assert far["tokens"] == streamed["tokens"] == near["tokens"]
    assert far["attaches"] == 1
