"""Load a target into vLLM, check that it verifies without changing tokens, and measure what its steps cost."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm.config.kernel import IrOpPriorityConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.engine import Engine
from cloud_verifier.engine.interface import Failed
from cloud_verifier.engine.step_profiler import measure_cost
from cloud_verifier.engine.vllm_backend.executor import VllmExecutor
from cloud_verifier.engine.vllm_backend.scheduler import PlannedScheduler
from cloud_verifier.engine.vllm_backend.worker import CPU_KERNELS, KV_SLOTS
from outrider.artifacts.model_files import INDEX
from outrider.core.errors import BadRequest, ModelRefused, Overloaded, Unavailable
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import (
    FIRST_DIRECTIVE,
    Attach,
    Directive,
    SessionLimits,
    logprobs_of,
    sampling_message,
)
from outrider.core.sampling import SamplingParams
from outrider.core.step_cost import StepCost

log = logging.getLogger(__name__)

CPU_BLOCK = 32
"""Tokens in a block of the KV cache on a CPU; with vLLM's own 128, short sessions would waste most of theirs."""
CHECK_PROMPTS = (3, 17, 40, 70, 130)
"""Lengths of the prompts of the check."""
CHECK_TOKENS = 12
"""Tokens that are generated for each of them."""
QUIET_STEPS = 200
"""Steps in a row without a token after which the check gives up: many more than its prompts take to read."""
TIE, HALF_TIE = 1e-3, 0.15
"""Differences of log-probabilities below which rounding may decide, in float32 and in half precision."""
OURS = {
    "scheduler_cls": "outrider schedules",
    "worker_cls": "outrider samples",
    "speculative_config": "devices draft",
    "async_scheduling": "a step's tokens decide on the next step's rows",
    "data_parallel_size": "a verifier is one replica; start several",
    "enable_prefix_caching": "it is prefix_cache",
    "mamba_cache_mode": "outrider's plan ends chunks of a prompt anywhere, and not where vLLM could cache states",
    "max_num_seqs": "it is --max-sessions",
    "max_num_batched_tokens": "it is token_budget",
}
"""Arguments of vLLM that are not for the operator -> why."""
RUNNING_STATE = (
    "it has layers that keep a running state of the sequence, from which vLLM on a CPU does not remove rejected draft"
    " tokens; try it on a GPU"
)
"""Why hybrids are refused. With vLLM 0.32 each that was tried failed in its first step or generated other tokens."""
WHOLE_PROMPTS = (
    "its prompts would have to be read whole, and outrider reads them in pieces; for latent attention (MLA) vLLM needs"
    " a GPU, or a CPU with AMX"
)
"""Why a target is refused for which vLLM has switched chunked prefill off."""


def engine_core(
    model: Path,
    config: EngineConfig,
    *,
    dtype: str = "auto",
    nodes: int,
    further: Mapping[str, Any] | None = None,
) -> EngineCore:
    """Return vLLM's core with our scheduler and sampling.

    nodes: the most draft tokens of one session in a step. further: arguments of vLLM's EngineArgs that the operator
    sets. Raises ModelRefused or BadRequest.
    """
    further = further or {}
    if (model / INDEX).is_file():  # else vLLM prefers Mistral's consolidated files, which the target's hash leaves out
        further = {"load_format": "hf", **further}
    for name in further.keys() & OURS.keys():
        raise BadRequest(f"engine_args sets {name}, which must be left out: {OURS[name]}", field="engine_args")
    backend = "cloud_verifier.engine.vllm_backend.worker"
    options: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "max_num_seqs": config.max_sessions,
        "max_num_batched_tokens": config.token_budget,
        "enable_prefix_caching": config.prefix_cache,
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        **further,
        "async_scheduling": False,
        "scheduler_cls": PlannedScheduler,
        "worker_cls": f"{backend}.CoupledWorker",
    }
    if nodes:
        options["speculative_config"] = {
            "method": "custom_class",
            "model": f"{backend}.NoProposer",
            "num_speculative_tokens": nodes,
        }
    try:
        arguments = EngineArgs(**options)
        if current_platform.is_cpu():
            _fit_cpu(arguments, config.kv_slots, further)
        settings = engine_settings(arguments)
        target = settings.model_config
        if nodes and current_platform.is_cpu() and (target.is_hybrid or target.is_attention_free):
            raise ModelRefused(f"vLLM does not serve {model}: {RUNNING_STATE}")
        if not settings.scheduler_config.enable_chunked_prefill:
            raise ModelRefused(f"vLLM does not serve {model}: {WHOLE_PROMPTS}")
        return EngineCore(settings, Executor.get_class(settings), log_stats=False)
    except ModelRefused:
        raise
    except Exception as error:
        remedy = ""
        if "max_model_len" in str(error) or "max_seq_len" in str(error):
            remedy = """; shorten it, as by --engine-args '{"max_model_len": 8192}', or with -1 to what fits"""
        raise ModelRefused(f"vLLM does not serve {model}: {type(error).__name__}: {error}{remedy}") from error


def engine_settings(arguments: EngineArgs) -> Any:
    """Return vLLM's configuration, without a prefix cache for targets with recurrent layers.

    Of such a layer vLLM caches the state only where a chunk of the prompt ends on a block, and it copies states by how
    many draft tokens were accepted. Our plan ends chunks anywhere, and nobody has shown yet that both go together.
    """
    settings = arguments.create_engine_config()
    if settings.cache_config.mamba_cache_mode != "none":
        log.warning("%s has recurrent layers (Mamba or the like): it is served without a prefix cache", arguments.model)
        arguments.enable_prefix_caching = False
        settings = arguments.create_engine_config()
    return settings


def _fit_cpu(arguments: EngineArgs, kv_slots: int, further: Mapping[str, Any]) -> None:
    """Give vLLM as many KV slots as the settings say, where the memory of a GPU does not decide, and no graphs."""
    if "enforce_eager" not in further:
        arguments.enforce_eager = True  # compiling takes minutes at every start
    # A compiler would fuse norms with what is around them instead.
    if arguments.enforce_eager and not {"ir_op_priority", "kernel_config"} & further.keys():
        arguments.ir_op_priority = IrOpPriorityConfig(rms_norm=[CPU_KERNELS], fused_add_rms_norm=[CPU_KERNELS])
    if "block_size" not in further:
        arguments.block_size = CPU_BLOCK
    if "max_model_len" not in further:
        arguments.max_model_len = min(arguments.create_model_config().max_model_len, kv_slots)
    if not {"kv_cache_memory_bytes", "num_gpu_blocks_override"} & further.keys():
        arguments.kv_cache_memory_bytes = 1 << 30  # so that it asks for no more; the slots decide
        arguments.additional_config = {**(arguments.additional_config or {}), KV_SLOTS: kv_slots}


def eos_token_ids(core: EngineCore) -> tuple[int, ...]:
    """Return the ids that end a sequence by any of the model's configurations."""
    model = core.vllm_config.model_config
    found = [(model.try_get_generation_config() or {}).get("eos_token_id")]
    found += [getattr(one, "eos_token_id", None) for one in (model.hf_config, model.hf_text_config)]
    each = [one for ids in found for one in (ids if isinstance(ids, list) else [ids])]
    return tuple(dict.fromkeys(one for one in each if one is not None))


def profile(executor: VllmExecutor, rows: int, sessions: int) -> StepCost:
    """Measure what steps of up to `rows` rows and so many sessions cost, as `step_profiler.measure_cost` does."""
    longest = executor.capabilities.max_sequence - 2
    return measure_cost(executor.step_seconds, min(rows, longest), sessions=sessions)


def check_outputs(executor: VllmExecutor, config: EngineConfig, *, half: bool) -> int:
    """Raise ModelRefused if draft tokens, or requests that join and leave, change a token; return how many were equal.

    Each prompt is continued alone, by plain steps; then all together, with drafts that are right, wrong or missing, and
    with steps that leave a sequence out. A token may differ where the plain run's two likeliest tokens are closer than
    a bound: `half`, in half precision.
    """
    rng = random.Random(0)
    vocabulary, longest = executor.capabilities.vocabulary, executor.capabilities.max_sequence - CHECK_TOKENS
    engine = Engine(executor, config)
    prompts = [rng.choices(range(vocabulary), k=min(length, longest)) for length in CHECK_PROMPTS]
    try:
        alone = [_continue(engine, f"alone {i}", [prompt], {}, rng)[0] for i, prompt in enumerate(prompts)]
        truth = {tuple(prompt): [token for token, _ in one] for prompt, one in zip(prompts, alone, strict=True)}
        together = _continue(engine, "together", prompts, truth, rng)
    except Unavailable as error:
        raise ModelRefused(f"vLLM {vllm.__version__} loads {executor.label}, but {error}") from error
    bound, equal = HALF_TIE if half else TIE, 0
    for number, (expected, got) in enumerate(zip(alone, together, strict=True)):
        for at, ((token, gap), (other, _)) in enumerate(zip(expected, got, strict=True)):
            if token == other:
                equal += 1
                continue
            if gap <= bound:
                break  # a tie: what follows is another sequence
            raise ModelRefused(
                f"{executor.label} cannot be served by vLLM {vllm.__version__}: beside others and with draft tokens,"
                f" sequence {number} has another token at position {at}, where the two likeliest are {gap:.2g} apart"
            )
    return equal


def _continue(
    engine: Engine,
    name: str,
    prompts: Sequence[list[int]],
    truth: Mapping[tuple[int, ...], list[int]],
    rng: random.Random,
) -> list[list[tuple[int, float]]]:
    """Return per prompt the greedy tokens, each with the difference of the two greatest log-probabilities.

    truth: tokens to draft for a prompt, of which some are replaced by wrong ones.
    """
    limits, directive = SessionLimits(run_ahead=1), Directive()
    directive.CopyFrom(FIRST_DIRECTIVE)
    directive.draft_wait_ms = 0
    greedy = sampling_message(SamplingParams())
    devices: dict[str, DeviceSession] = {}
    for i, prompt in enumerate(prompts):
        asked = Attach(prompt=prompt, sampling=greedy, max_tokens=CHECK_TOKENS, logprobs=2, ignore_eos=True)
        devices[f"{name} {i}"] = DeviceSession(asked)
    found: dict[str, list[tuple[int, float]]] = {key: [] for key in devices}
    waiting, quiet = list(devices), 0
    while not all(device.finished for device in devices.values()):
        if waiting:  # one joins at every step, so that some read their prompts while others generate
            device = devices[waiting[-1]]
            try:
                engine.start(waiting[-1], device.attach(device.epoch + 1, limits), limits, directive)
                waiting.pop()
            except Overloaded:  # few sessions fit
                if len(waiting) == len(devices):
                    raise
        for key, device in devices.items():
            if key in waiting or device.finished or (truth and rng.random() < 0.2):
                continue  # a step leaves a session out whose device has not confirmed the last commit
            known, parent = truth.get(tuple(device.prompt), []), 0
            for token in known[len(device.received) :][: rng.randrange(5)] if not len(device.tree) else ():
                node = device.add(parent, token if rng.random() < 0.7 else rng.choice(device.prompt))
                if node is None:
                    break
                parent = node
            while (append := device.poll(resting=True)) is not None:
                engine.append(key, append)
        events = engine.step()
        quiet = 0 if events else quiet + 1
        if quiet > QUIET_STEPS:
            raise ModelRefused(f"vLLM has generated no token in {QUIET_STEPS} steps of its check")
        for event in events:
            if isinstance(event, Failed):
                raise ModelRefused(f"vLLM failed on its check: {event.error}")
            for token, logprobs in zip(event.commit.token, logprobs_of(event.commit), strict=True):
                (_, first), (_, second) = logprobs.top
                found[event.session_id].append((token, first - second))
            devices[event.session_id].on_commit(event.commit)
    for key in devices:
        engine.stop(key)
    return list(found.values())
