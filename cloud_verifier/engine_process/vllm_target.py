"""Load a target into vLLM, and serve it. Runs in an interpreter whose environment has vLLM."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine.server_draft.ngram import ServerNgramSource
from cloud_verifier.engine.vllm_backend import SUPPORTED, load
from cloud_verifier.engine.vllm_backend.executor import VllmExecutor
from cloud_verifier.engine.weights import end_token_ids, hash_of, vocabulary_of
from cloud_verifier.engine_process.ipc import EngineEnd
from cloud_verifier.engine_process.loop import engine_config, send_progress, serve_target
from outrider.core.errors import ModelRefused
from outrider.wire.v1 import session_pb2


def serve(config: VerifierConfig, end: EngineEnd) -> None:
    """Load the target and serve it until the front closes its end or sends Quit. Raises ModelRefused."""
    progress = partial(send_progress, end)
    on_cpu, given = current_platform.is_cpu(), config.engine_args
    if config.device not in ("cpu", "cuda"):
        raise ModelRefused(f"device is {config.device}; vLLM takes the GPUs that CUDA_VISIBLE_DEVICES shows: give cuda")
    if on_cpu != (config.device == "cpu"):
        built = "a CPU" if on_cpu else "GPUs"
        raise ModelRefused(f"device is {config.device}, and the vLLM of this environment is built for {built}")
    digest = hash_of(Path(config.model), progress)
    progress(f"loading {config.target_name} into vLLM")
    limits = engine_config(config)
    core = load.engine_core(
        config.model,
        limits,
        dtype="float32" if config.dtype == "auto" and on_cpu else config.dtype,
        nodes=given.nodes_per_step,
        further=given.of_vllm,
    )
    logits = core.vllm_config.model_config.get_vocab_size()
    ends = end_token_ids(config.model, [load.eos_token_ids(core)], logits)
    vocabulary = vocabulary_of(Path(config.model), logits, ends)
    executor = VllmExecutor(core, limits, label=config.target_name, eos_token_ids=ends, vocabulary=vocabulary)
    progress("checking that draft tokens change no output")
    load.check_outputs(executor, limits, half=core.vllm_config.model_config.dtype.itemsize < 4)
    progress("measuring what a step costs")
    executor.cost = load.profile(executor, given.token_budget, config.max_sessions)
    core.model_executor.collective_rpc("load_grammars", args=(executor.eos_token_ids,))
    model: Any = core.vllm_config.model_config
    target = session_pb2.TargetIdentity(
        name=config.target_name,
        weights_hash=f"sha256:{digest}",
        dtype=str(model.dtype).removeprefix("torch."),
        backend=f"vllm {SUPPORTED}" + (f" {model.quantization}" if model.quantization else ""),
        hardware=current_platform.get_device_name(),
    )
    serve_target(config, end, executor, [ServerNgramSource()] if given.ngram else [], target)
    core.shutdown()
    os._exit(0)  # at a usual exit, libraries of vLLM print pages of what they leak
