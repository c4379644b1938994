"""Run a target for the engine by vLLM: one request for each session and epoch, one step of vLLM's core for each step.

vLLM holds the keys and values in blocks, caches prefixes by itself, and preempts requests when blocks run out: such a
session's tokens are computed again in later steps, and its device sees nothing but a pause.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.interface import Completion, KVUsage, Lap, SessionRows
from cloud_verifier.engine.recording import put_distributions, recorded_event
from cloud_verifier.engine.sampling import LEAST_LOGPROB
from cloud_verifier.engine.session import Capabilities, EngineSession
from cloud_verifier.engine.vllm_backend.scheduler import PlannedScheduler, RequestRows
from cloud_verifier.engine.vllm_backend.worker import NO_TOKEN, SESSION
from outrider.core.errors import InternalError, OutriderError, Overloaded, Unavailable
from outrider.core.protocol.messages import TokenLogprobs, sampling_message
from outrider.core.sampling import SamplingParams as CoreSampling
from outrider.core.step_cost import StepCost
from outrider.core.text import short_id
from outrider.core.verification import TreeBatch, Verified
from outrider.wire.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)


class VllmExecutor:
    """Implements TargetExecutor. Its steps are chains: vLLM evaluates no trees."""

    def __init__(
        self,
        core: EngineCore,
        config: EngineConfig,
        *,
        label: str,
        eos_token_ids: tuple[int, ...] = (),
        vocabulary: int | None = None,
    ) -> None:
        """Take a core whose scheduler is a PlannedScheduler and whose workers are CoupledWorkers.

        vocabulary: the number of ids that may be chosen, where that is not all of the model's.
        """
        model = core.vllm_config.model_config
        vocabulary = vocabulary or model.get_vocab_size()
        core.model_executor.collective_rpc("bound_vocabulary", args=(vocabulary,))
        self.label = label
        self.eos_token_ids = eos_token_ids
        self.cost = StepCost({1: 1e-3})
        self.forward_s = 0.0
        self.capabilities = Capabilities(
            trees=False,
            nodes_per_step=core.scheduler.num_spec_tokens,
            max_sequence=model.max_model_len,
            vocabulary=vocabulary,
        )
        self.unrecorded = 0
        self._core = core
        self._scheduler: PlannedScheduler = core.scheduler
        self._record_top = config.record_top
        self._ahead = core.scheduler.num_spec_tokens
        blocks = core.scheduler.kv_cache_config.num_blocks
        self._blocks = int(blocks) - 1  # vLLM never uses the first one
        concurrency = get_max_concurrency_for_kv_cache_config(core.vllm_config, core.scheduler.kv_cache_config)
        self._slots_per_block: float = model.max_model_len * concurrency / blocks
        """Tokens of a longest sequence for each of its blocks; there is a block of each kind of layer."""
        self._requests: dict[EngineSession, Request] = {}
        self._numbers = itertools.count(1)
        self._recorded: list[pb.EngineEvent] = []

    @property
    def overlaps(self) -> bool:
        return False

    @property
    def preemptions(self) -> int:
        """Return how often a session has lost its keys and values to another one."""
        return self._scheduler.preemptions

    @property
    def usage(self) -> KVUsage:
        pool = self._scheduler.kv_cache_manager.block_pool
        free, cached = pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block)
        used = self._blocks - free
        missing = self._scheduler.blocks_missing(self._requests.values(), self._ahead)

        def slots(blocks: int) -> int:
            return round(blocks * self._slots_per_block)

        return KVUsage(
            capacity=slots(self._blocks),
            used=slots(used),
            reserved=slots(min(self._blocks, used + missing)),
            cached=slots(max(0, min(cached - used, free))),
        )

    def admit(self, session: EngineSession, replaced: EngineSession | None) -> None:
        attach = session.protocol.attach
        top = session.protocol.logprobs
        if session.record:
            top = max(top or 0, self._record_top)
        request = self._request(
            f"{short_id(session.session_id)}/{attach.epoch}/{next(self._numbers)}",
            list(session.tokens),
            len(attach.prompt),
            session.sampler.params,
            max_tokens=max(1, session.left),  # vLLM always gives one; a session that is scored alone takes none
            salt=session.salt,
            top=top,
            ends=session.protocol.end_token_ids,
            min_tokens=attach.min_tokens,
            prompt_top=attach.prompt_logprobs if session.protocol.scoring else None,
        )
        scheduler, older = self._scheduler, self._requests.get(replaced) if replaced else None
        others = [other for other in self._requests.values() if other is not older]
        free = scheduler.free_blocks + (scheduler.blocks_freed(older, request) if older else 0)
        reserved = scheduler.blocks_missing(others, self._ahead)
        needed = scheduler.blocks_missing([*others, request], self._ahead) - reserved
        if needed > free - reserved:
            raise Overloaded(f"{needed} KV blocks are needed, {max(0, free - reserved)} are free")
        session.computed = scheduler.cached_tokens(request)
        self._requests[session] = request

    def ready_for(self, grammar: str) -> bool:
        return all(self._core.model_executor.collective_rpc("knows_grammar", args=(grammar, self.eos_token_ids)))

    def begin(self, session: EngineSession) -> None:
        self._core.add_request(self._requests[session])

    def prepare(self, rows: SessionRows) -> None:
        """Do nothing: vLLM's scheduler lays out the rows."""

    def launch(self, rows: Sequence[SessionRows], lap: Lap) -> Completion:
        """Run the step: vLLM's core returns when it has ended."""
        self._scheduler.plan = {
            self._requests[one.session].request_id: RequestRows(one.chain, one.batch.tokens if one.batch else ())
            for one in rows
        }
        lap("plan")
        begun = time.perf_counter()
        outputs = self._step()
        self.forward_s = time.perf_counter() - begun
        return partial(self._complete, rows, outputs)

    def _complete(
        self, rows: Sequence[SessionRows], outputs: dict[str, Any], lap: Lap
    ) -> list[Verified | OutriderError | None]:
        lap("forward")
        results = [self._result(one, outputs.get(self._requests[one.session].request_id)) for one in rows]
        for session, request in self._requests.items():
            if request.status is not RequestStatus.WAITING:
                session.computed = min(request.num_computed_tokens, len(session.tokens) - 1)  # 0 after a preemption
        self._look_for_room({one.session for one, count in zip(rows, self.rows_run(rows), strict=True) if not count})
        lap("verify")
        return results

    def rows_run(self, rows: Sequence[SessionRows]) -> list[int]:
        return [self._scheduler.rows.get(self._requests[one.session].request_id, 0) for one in rows]

    def hidden_states(self, session: EngineSession) -> None:
        """Return None: the states are not kept."""

    def keep(self, rows: SessionRows, accepted: Sequence[int]) -> None:
        session = rows.session
        session.computed = min(self._requests[session].num_computed_tokens, len(session.tokens) - 1)

    def end(self, session: EngineSession, *, cache: bool) -> None:
        request = self._requests.pop(session, None)
        if request is not None:
            if not cache:
                self._scheduler.evict_blocks(request)
            self._core.abort_requests([request.request_id])
            self._look_for_room()

    def take_recorded(self) -> list[pb.EngineEvent]:
        recorded, self._recorded = self._recorded, []
        return recorded

    def step_seconds(self, counts: Sequence[int]) -> float:
        """Return the seconds of one step that reads prompts of so many tokens each, which are dropped then.

        For measurements before the first session.
        """
        names = [f"measured {next(self._numbers)}" for _ in counts]
        for name, count in zip(names, counts, strict=True):
            self._core.add_request(self._request(name, [0] * count, count, CoreSampling(), max_tokens=2, salt=name))
        self._scheduler.plan = {name: RequestRows(count) for name, count in zip(names, counts, strict=True)}
        begun = time.perf_counter()
        self._step()
        taken = time.perf_counter() - begun
        self._core.abort_requests(names)
        return taken

    def _request(
        self,
        name: str,
        tokens: list[int],
        prompt: int,
        sampling: CoreSampling,
        *,
        max_tokens: int,
        salt: str,
        top: int | None = None,
        prompt_top: int | None = None,
        ends: Collection[int] = (),
        min_tokens: int = 0,
    ) -> Request:
        """Return a request of known tokens, the first `prompt` of which are the session's prompt.

        top: alternatives of each token, None for no log-probabilities. prompt_top: the same for the known tokens, none
        of which comes out of the prefix cache then. ends: ids that end the sequence, not before it has `min_tokens`.
        """
        session = {
            "prompt": prompt,
            "sampling": sampling_message(sampling).SerializeToString(),
            "eos": self.eos_token_ids,
            "ends": tuple(ends),
            "min_tokens": min_tokens,
        }
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=top,
            prompt_logprobs=prompt_top,
            extra_args={SESSION: session},
        )
        hasher = self._core.request_block_hasher
        return Request(name, tokens, params, None, cache_salt=salt or None, block_hasher=hasher)

    def _look_for_room(self, passed_over: Collection[EngineSession] = ()) -> None:
        """Mark the sessions for which vLLM has no blocks now: a step could not serve them.

        passed_over: sessions of which the last step had no row although it was to have some.
        """
        for session, request in self._requests.items():
            waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            doubtful = session.blocked or session in passed_over or request.status is RequestStatus.PREEMPTED
            session.blocked = (
                waits
                and doubtful
                and self._scheduler.blocks_missing([request], self._ahead) > self._scheduler.free_blocks
            )

    def _step(self) -> dict[str, Any]:
        """Run one step of vLLM's core; return its outputs by request id. Raises Unavailable if it fails."""
        try:
            outputs, _ = self._core.step()  # `post_step` would only ask each worker what it drafts, which is nothing
        except Exception as error:
            # Its scheduler has counted tokens that were not computed, so no session can go on.
            raise Unavailable(f"a step of vLLM failed: {type(error).__name__}: {error}") from error
        return {output.request_id: output for client in outputs.values() for output in client.outputs}

    def _result(self, rows: SessionRows, output: Any) -> Verified | OutriderError | None:
        """Return a session's path or error; None if its known tokens are not all computed yet. Never raises: vLLM has
        counted the tokens already, so the step cannot be tried again."""
        session, request = rows.session, self._requests[rows.session]
        if output is None and request.num_computed_tokens < request.num_tokens:
            return None
        if output is None or output.new_token_ids[:1] in ([], [NO_TOKEN]):
            return _why_no_token(session, rows.batch)
        try:
            if output.new_prompt_logprobs_tensors is not None:
                session.scores = _scores(output.new_prompt_logprobs_tensors)[session.protocol.scored :]
            if not session.left:
                return None
            verified = _verified(session, rows.batch, output.new_token_ids)
            logprobs, top = output.new_logprobs, session.protocol.logprobs
            if logprobs is not None and top is not None:
                kept = np.s_[: len(verified.tokens), : top + 1]
                session.logprobs = _token_logprobs(logprobs.logprob_token_ids[kept], logprobs.logprobs[kept])
        except Exception as error:
            return InternalError(f"its tokens cannot be taken: {type(error).__name__}: {error}")
        if session.record:
            try:
                self._record(session, verified, output.new_logprobs)
            except Exception:
                if not self.unrecorded:
                    log.exception("%d tokens cannot be recorded, and maybe more from here on", len(verified.tokens))
                self.unrecorded += len(verified.tokens)
        return verified

    def _record(self, session: EngineSession, verified: Verified, logprobs: Any) -> None:
        """Keep a session's tokens, before they are committed, with the target's distributions."""
        count, most = len(verified.tokens), self._record_top + 1
        log_probs = np.maximum(logprobs.logprobs[:count, 1:most], LEAST_LOGPROB)
        tail = np.maximum(0.0, 1.0 - np.exp(log_probs).sum(axis=1))
        event = recorded_event(session, verified)
        put_distributions(event, logprobs.logprob_token_ids[:count, 1:most], log_probs, tail)
        self._recorded.append(event)


def _scores(logprobs: Any) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of a whole prompt, of which vLLM gives tensors."""
    return _token_logprobs(logprobs.logprob_token_ids.numpy(), logprobs.logprobs.float().numpy())


def _token_logprobs(ids: Any, values: Any) -> tuple[TokenLogprobs, ...]:
    """Return log-probabilities out of arrays `[n, 1 + top]`, in which each token comes before its alternatives."""
    clipped = np.clip(values, LEAST_LOGPROB, 0.0)
    return tuple(
        TokenLogprobs(own[0], tuple(zip(alternatives[1:], own[1:], strict=True)))
        for own, alternatives in zip(clipped.tolist(), ids.tolist(), strict=True)
    )


def _why_no_token(session: EngineSession, batch: TreeBatch | None) -> OutriderError:
    """Return the error of a session for which the worker has chosen no token: its grammar's, or the target's.

    Follows the grammar along the chain as the worker does, since only tokens come back from there.
    """
    constraint, path = session.sampler.constraint, list[int]()
    try:
        if constraint is not None:
            for token in batch.tokens if batch is not None else ():
                if not constraint.allows(token, session.protocol.position + len(path), path):
                    break
                path.append(token)
            constraint.allowed(1, session.protocol.position + len(path), path)
            constraint.forced(path)
    except OutriderError as error:
        return error
    return InternalError("no token can be chosen: the target's logits are not finite, or sampling failed")


def _verified(session: EngineSession, batch: TreeBatch | None, tokens: Sequence[int]) -> Verified:
    """Return the path of a chain that vLLM has verified. tokens: the accepted nodes' and the target's own next one."""
    path: list[int] = []
    for token in tokens:
        path.append(token)
        if session.protocol.ends(token, session.protocol.position + len(path) - 1):
            break
    nodes = batch.tokens if batch else ()
    accepted = sum(1 for token, node in zip(path, nodes, strict=False) if token == node)
    return Verified(tuple(path), tuple(range(1, min(accepted, len(tokens) - 1) + 1)))
