"""Sample in vLLM's worker as the engine does: the target's token is coupled to the session's noise.

Works on private interfaces of vLLM 0.32, see `vllm_backend.SUPPORTED`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import ir
from vllm.distributed import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from cloud_verifier.engine.device_sampling import DeviceSampler, SessionWalk, walk_together
from cloud_verifier.engine.sampling import Sampler, top_logprobs
from outrider.core.constraint import Grammars, constraint_of, grammars_of
from outrider.core.errors import ModelRefused
from outrider.core.protocol.messages import Sampling, sampling_of
from outrider.core.verification import chain_of

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker

log = logging.getLogger(__name__)

SESSION = "outrider"
"""Key of a session's sampling parameters among the extra arguments of its request."""
KV_SLOTS = "outrider_kv_slots"
"""Key, in vLLM's additional configuration, of the number of tokens whose keys and values are held."""
NO_TOKEN = -1
"""Fills the rest of a row of tokens, as vLLM's rejection sampler does."""


CPU_KERNELS = "outrider"
"""vLLM's name for what computes the layers' norms by its kernels for CPUs."""
if current_platform.is_cpu():
    current_platform.import_kernels()

    def _normalises(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
        """Return whether vLLM's kernels for CPUs compute the norm of these rows."""
        return variance_size is None and weight is not None and weight.dtype == x.dtype

    # vLLM has these kernels on a CPU too, and uses them on GPUs alone: without compiling, a norm is six operations of
    # torch there, which take ten times as long for a few rows. They take no strides.
    @ir.ops.rms_norm.register_impl(  # type: ignore[untyped-decorator]
        CPU_KERNELS, supports_args=lambda x, weight, epsilon, variance_size=None: _normalises(x, weight, variance_size)
    )
    def _rms_norm(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
        return out

    @ir.ops.fused_add_rms_norm.register_impl(  # type: ignore[untyped-decorator]
        CPU_KERNELS,
        supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: (
            _normalises(x, weight, variance_size) and x.is_contiguous() and x_residual.is_contiguous()
        ),
        inplace=True,
    )
    def _fused_add_rms_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual


class CoupledWorker(_Worker):  # type: ignore[misc]
    """A worker of vLLM whose model runner samples by `CoupledSampling`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._compiling: dict[str, Future[None]] = {}
        """grammar -> its compilation, until somebody knows that it has ended"""
        runner = self.model_runner
        runner._sample = CoupledSampling(runner)
        if not get_pp_group().is_last_rank:
            runner.drafter = NoProposer(None)  # vLLM makes one on the last rank alone, and asks for it on all
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            # vLLM makes them when it warms up, which it leaves out on a CPU without compiling.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def bound_vocabulary(self, count: int) -> None:
        """Never choose an id at or beyond `count`, which stands for no token."""
        self.model_runner._sample.vocabulary = count

    def load_grammars(self, eos_token_ids: Sequence[int]) -> None:
        """Read the tokenizer before the first session with a grammar comes."""
        with suppress(ModelRefused):  # the engine has told why, and refuses such sessions
            target_grammars(self.model_runner, eos_token_ids)

    def knows_grammar(self, grammar: str, eos_token_ids: Sequence[int]) -> bool:
        """Return whether no step will compile a grammar; begins to compile an unknown one beside the steps.

        A grammar that cannot be compiled counts as known: the step that needs it says why.
        """
        if not get_pp_group().is_last_rank:
            return True  # it chooses no tokens
        grammars = target_grammars(self.model_runner, eos_token_ids)
        if grammars.knows(grammar):
            self._compiling.pop(grammar, None)
            return True
        if grammar not in self._compiling:
            self._compiling[grammar] = self._compiler.submit(grammars.compile, grammar)
        return self._compiling[grammar].done()

    def determine_available_memory(self) -> int:
        available: int = super().determine_available_memory()
        wanted = _bytes_of_slots(self.vllm_config, self.get_kv_cache_spec())
        return available if wanted is None else wanted

    def execute_model(self, scheduler_output: Any) -> Any:
        if not get_pp_group().is_last_rank:
            take_sampled(self.model_runner, scheduler_output.scheduled_cached_reqs)
        return super().execute_model(scheduler_output)


def _bytes_of_slots(vllm_config: Any, layers: dict[str, Any]) -> int | None:
    """Return the bytes of as many slots as the configuration says; None if it says nothing.

    layers: name -> vLLM's description of its cache. A block holds keys and values of one kind of layers alone, such as
    those with a sliding window, and all blocks come from one pool: so the slots take blocks of every kind, as many as
    that number of tokens takes, or the longest sequence if that is more.
    """
    slots = (vllm_config.additional_config or {}).get(KV_SLOTS)
    if slots is None:
        return None
    register_all_kvcache_specs(vllm_config)
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, layers)
    blocks = 1  # vLLM never uses the first one
    for spec in (group.kv_cache_spec for group in groups):
        longest = -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
        blocks += max(longest, -(-slots // spec.block_size))
    size: int = kv_cache_utils._pool_bytes_per_block(vllm_config, groups)
    return blocks * size


def take_sampled(runner: Any, cached: Any) -> None:
    """Give the model runner of a rank that does not sample the tokens of each request's last step.

    cached: what `PlannedScheduler` says of the requests that the rank knows. vLLM itself appends the tokens that the
    next step computes, as if one token had been sampled. After accepted draft tokens the rank's sequence would be too
    short, and once the request has left the batch for a step, the rank would read wrong tokens.
    """
    batch = runner.input_batch
    for name, last, count in zip(cached.req_ids, cached.new_token_ids, cached.num_output_tokens, strict=True):
        output = runner.requests[name].output_token_ids
        tokens = last[len(last) - (count - len(output)) :]
        output.extend(tokens)
        index = batch.req_id_to_index.get(name)
        if index is not None:
            begin = batch.num_tokens_no_spec[index]
            end = batch.num_tokens_no_spec[index] = begin + len(tokens)
            batch.token_ids_cpu[index, begin:end] = tokens
            batch.is_token_ids[index, begin:end] = True
    cached.new_token_ids = [[] for _ in cached.req_ids]


def target_grammars(runner: Any, eos_token_ids: Sequence[int]) -> Grammars:
    """Return the process's grammars of a model runner's target. Raises ModelRefused."""
    path = Path(runner.model_config.model) / "tokenizer.json"
    return grammars_of(path, runner._sample.vocabulary, tuple(eos_token_ids))


class NoProposer:
    """Drafts nothing in the worker: vLLM asks for a proposer where it is to verify draft tokens."""

    def __init__(self, config: Any) -> None:
        pass

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        pass

    def propose(self, sampled: Any, *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled]


class CoupledSampling:
    """Stands in for the model runner's `_sample`: a draft token is accepted iff it equals the target's own token, or by
    typical acceptance where the session asks for that."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.vocabulary: int = runner.model_config.get_vocab_size()
        """Logits of a row that count."""
        self._device = DeviceSampler.on(torch.device(runner.device))
        self._sessions: dict[str, tuple[Any, Sampler, int]] = {}
        """request id -> (the runner's state of the request, its sampler, generated tokens before the request)"""

    def __call__(self, logits: torch.Tensor, meta: Any) -> SamplerOutput:
        logits = logits[:, : self.vocabulary]
        request_ids, discarded = self._runner.input_batch.req_ids, self._runner.discard_request_mask.np
        counts = list(meta.num_draft_tokens) if meta is not None else [0] * len(request_ids)
        drafts = meta.draft_token_ids.tolist() if meta is not None else []
        tokens = np.full((len(request_ids), max(counts, default=0) + 1), NO_TOKEN, dtype=np.int32)
        walks: dict[int, SessionWalk] = {}
        row = draft = 0
        for index, (request_id, count) in enumerate(zip(request_ids, counts, strict=True)):
            if discarded[index]:
                # Nobody reads it, but a hybrid's layers take the number of tokens for how many were accepted.
                tokens[index, 0] = 0
            else:
                try:
                    walks[index] = self._walk(request_id, row, drafts[draft : draft + count])
                except Exception:  # a row without a token: the executor notices, and the session fails alone
                    log.exception("the sampling parameters of request %s cannot be used", request_id)
            row += count + 1
            draft += count
        visited: list[tuple[int, int]] = []
        walk_together(logits, [*walks.values()], self._device)
        for index, walk in walks.items():
            if walk.error is not None:
                log.error("a token of request %s cannot be chosen", request_ids[index], exc_info=walk.error)
                continue
            walk.sampler.commit(walk.tokens)
            tokens[index, : len(walk.tokens)] = walk.tokens
            if self._runner.requests[request_ids[index]].sampling_params.logprobs is not None:
                visited += [(index * tokens.shape[1] + at, walk.first + at) for at in range(len(walk.tokens))]
        self._forget()
        sampled = torch.from_numpy(tokens)
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=self._logprobs(logits, tokens, visited))

    def _walk(self, request_id: str, first: int, drafts: Sequence[int]) -> SessionWalk:
        """Return the walk down a request's rows, which begin at `first`."""
        state = self._runner.requests[request_id]
        sampler, before = self._sampler(request_id, state)
        ends = state.sampling_params.extra_args[SESSION]["ends"]
        chain = chain_of(drafts, before + len(state.output_token_ids))
        return SessionWalk(chain, lambda token, position: token in ends, sampler, first)

    def _sampler(self, request_id: str, state: Any) -> tuple[Sampler, int]:
        """Return the request's sampler, and the number of tokens that were generated before the request."""
        known = self._sessions.get(request_id)
        if known is None or known[0] is not state:  # ids may come again
            session = state.sampling_params.extra_args[SESSION]
            prompt, output = state.prompt_token_ids[: session["prompt"]], state.prompt_token_ids[session["prompt"] :]
            params = sampling_of(Sampling.FromString(session["sampling"]))
            tokens = [*output, *state.output_token_ids]
            grammar = None
            if params.grammar:
                grammar = target_grammars(self._runner, session["eos"]).begin(params.grammar)
            constraint = constraint_of(grammar, session["ends"], session["min_tokens"], tokens)
            sampler = Sampler(params, prompt, tokens, constraint)
            known = self._sessions[request_id] = (state, sampler, len(output))
        return known[1], known[2]

    def _forget(self) -> None:
        """Forget the samplers of requests that have ended."""
        if len(self._sessions) > 2 * len(self._runner.requests) + 16:
            live = self._runner.requests
            self._sessions = {key: known for key, known in self._sessions.items() if live.get(key) is known[0]}

    def _logprobs(
        self, logits: torch.Tensor, tokens: np.ndarray[Any, Any], visited: list[tuple[int, int]]
    ) -> LogprobsTensors | None:
        """Return log-probabilities of the tokens and of the likeliest ids in the layout of vLLM's rejection sampler.

        That is a row for every place of `tokens`, also for those without a token. visited: (place, row of the logits)
        of the tokens of requests that ask for them.
        """
        top = self._runner.input_batch.max_num_logprobs
        if top is None or not visited:
            return None
        places, rows = (torch.tensor(column) for column in zip(*visited, strict=True))
        values = logits.index_select(0, rows.to(logits.device)).float()
        ids, best, total = top_logprobs(values, top)
        chosen = torch.from_numpy(tokens).flatten()[places].long().to(logits.device).unsqueeze(1)
        own = values.gather(1, chosen) - total
        size = tokens.size
        all_ids = torch.zeros(size, top + 1, dtype=torch.int32)
        all_logprobs = torch.zeros(size, top + 1)
        found = ids.shape[1] + 1
        all_ids[places, :found] = torch.cat([chosen, ids], dim=1).int().cpu()
        all_logprobs[places, :found] = torch.cat([own, best], dim=1).cpu()
        return LogprobsTensors(all_ids, all_logprobs, torch.zeros(size, dtype=torch.int32))
