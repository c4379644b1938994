"""Load a target for our own engine, and serve it."""

from __future__ import annotations

from functools import partial

from transformers.utils.logging import disable_progress_bar

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine.server_draft.base import ServerSource
from cloud_verifier.engine.server_draft.head_models import describe_heads, load_heads
from cloud_verifier.engine.server_draft.heads import HeadsSource
from cloud_verifier.engine.server_draft.llama_draft import LlamaServerDraft
from cloud_verifier.engine.server_draft.ngram import ServerNgramSource
from cloud_verifier.engine.torch_backend.executor import TorchExecutor, profile
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from cloud_verifier.engine.weights import Progress
from cloud_verifier.engine_process.ipc import EngineEnd
from cloud_verifier.engine_process.loop import engine_config, send_progress, serve_target
from outrider.core.errors import ModelRefused
from outrider.core.vocabulary import compare_token_tables, special_ids, token_table
from outrider.wire.v1 import session_pb2

DRAFT_DEPTH = 4
"""Tokens that the server draft proposes ahead; each costs one decode for all its sessions together."""
DRAFTED_SESSIONS = 64
"""The most sessions that the server draft serves at once; each takes a KV cache of the draft's whole context."""


def serve(config: VerifierConfig, end: EngineEnd) -> None:
    """Load the target and serve it until the front closes its end or sends Quit. Raises ModelRefused."""
    disable_progress_bar()  # it would write into the front's log, from a thread of its own

    progress = partial(send_progress, end)
    model = TargetModel.load(
        config.model,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        name=config.target_name,
        on_progress=progress,
    )
    heads = _heads(config, model, progress)
    progress("numerics check: token trees against plain sequences")
    check_numerics(model)
    progress("measuring what a step costs")
    executor = TorchExecutor(model, engine_config(config), profile(model, config.engine_args.token_budget))
    ngram = [ServerNgramSource()] if config.engine_args.ngram else []
    target = session_pb2.TargetIdentity(
        name=model.name,
        weights_hash=f"sha256:{model.weights_hash}",
        dtype=model.dtype,
        backend=model.backend,
        hardware=model.hardware,
    )
    serve_target(config, end, executor, [*ngram, *heads, *_server_draft(config, model, progress)], target)


def _heads(config: VerifierConfig, model: TargetModel, progress: Progress) -> list[ServerSource]:
    """Load the heads that the settings name, and have the model keep the states that they read. Raises ModelRefused."""
    if config.heads is None:
        return []
    if not config.heads.is_file():
        raise ModelRefused(f"heads {config.heads} is no file; give the heads.safetensors that outrider-distill wrote")
    model.keep_states()
    progress(f"heads {describe_heads(config.heads)}")
    heads = load_heads(config.heads, f"sha256:{model.weights_hash}", int(model.config.hidden_size))
    return [HeadsSource(heads.to(model.device, model.torch_dtype), model, vocabulary=model.vocab_size)]


def _server_draft(config: VerifierConfig, model: TargetModel, progress: Progress) -> list[LlamaServerDraft]:
    """Load the server draft, if the settings name one. Raises ModelRefused or VocabularyMismatch."""
    if config.server_draft is None:
        return []
    from outrider.llama import ChainContext, LlamaModel

    progress(f"loading {config.server_draft.name}, the server draft")
    draft = LlamaModel.load(config.server_draft, threads=config.threads)
    tokenizer = (config.model / "tokenizer.json").read_bytes()
    special = draft.special_ids() | special_ids(tokenizer)
    _, unlike = compare_token_tables(draft.token_table(), token_table(tokenizer), special, config.server_draft.name)
    # At most twice the tokens of the target's own pool in all; each sequence has room for a whole one.
    length = min(draft.n_ctx_train, model.max_sequence, config.kv_slots)
    count = min(config.max_sessions, DRAFTED_SESSIONS, max(1, 2 * config.kv_slots // length))
    progress(f"the server draft serves {count} sessions of up to {length} tokens at once")
    chains = ChainContext(draft, length=length, count=count, threads=config.threads)
    return [LlamaServerDraft(chains, depth=DRAFT_DEPTH, vocabulary=model.vocab_size, unlike=unlike)]
