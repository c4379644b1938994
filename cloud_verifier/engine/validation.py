"""What the engine refuses, whoever calls it: what no waiting could mend."""

from __future__ import annotations

from cloud_verifier.engine.model import TargetModel
from cloud_verifier.engine.session import slots_needed
from outrider.core.errors import BadRequest
from outrider.core.protocol.messages import Attach, SessionLimits


def check_attach(attach: Attach, limits: SessionLimits, model: TargetModel, slots: int) -> None:
    """slots: of the KV pool. Raises BadRequest for a session that the target or the pool could never hold."""
    prompt, longest = len(attach.prompt), model.max_sequence
    if prompt == 0:
        raise BadRequest.bound("prompt", "empty", "at least one token")
    if attach.max_tokens < 1:
        raise BadRequest.bound("max_tokens", attach.max_tokens, "at least 1")
    if prompt + attach.max_tokens > longest:
        got = f"{prompt} + {attach.max_tokens}"
        raise BadRequest.bound("prompt length + max_tokens", got, f"at most {longest}, the target's longest sequence")
    if slots_needed(attach, limits) > slots:
        got = f"{prompt} + {attach.max_tokens}"
        room = slots - limits.nodes
        raise BadRequest.bound("prompt length + max_tokens", got, f"at most {room}, what the verifier can hold")
    if len(attach.tokens) > attach.max_tokens:
        raise BadRequest.bound("tokens", f"{len(attach.tokens)} long", f"at most max_tokens = {attach.max_tokens}")
    for field in ("prompt", "tokens", "stop_token_ids"):
        ids: tuple[int, ...] = getattr(attach, field)
        if ids and not (min(ids) >= 0 and max(ids) < model.vocab_size):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise BadRequest.bound(field, f"holding {wrong}", f"ids from 0 to {model.vocab_size - 1}")
