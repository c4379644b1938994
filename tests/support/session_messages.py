"""Make messages of the session protocol with few words."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

from outrider.core.protocol.messages import (
    FIRST_DIRECTIVE,
    Attach,
    Commit,
    Directive,
    Finish,
    append_message,
    pack_logprobs,
    sampling_message,
)
from outrider.core.sampling import SamplingParams

M = TypeVar("M", bound=Message)

append = append_message


def attach(epoch: int = 1, prompt: Any = (), *, sampling: SamplingParams | None = None, **fields: Any) -> Attach:
    sampled = sampling_message(sampling or SamplingParams())
    return Attach(**{"max_tokens": 256} | fields, epoch=epoch, prompt=prompt, sampling=sampled)


def commit(
    epoch: int, start: int, tokens: Any, seen: int, finish: Finish = Finish.NONE, *, logprobs: Any = ()
) -> Commit:
    message = Commit(epoch=epoch, start=start, token=tokens, seen=seen, finish=f"FINISH_{finish.name}")
    pack_logprobs(message, logprobs)
    return message


def scored(epoch: int, start: int, before: int, logprobs: Any = (), seen: int = 0) -> Commit:
    """Return a Commit without tokens that scores tokens of the prompt after `before` others."""
    message = commit(epoch, start, (), seen)
    message.prompt.start = before
    pack_logprobs(message.prompt, logprobs)
    return message


def directive(**fields: Any) -> Directive:
    return changed(FIRST_DIRECTIVE, **fields)


def changed(message: M, **fields: Any) -> M:
    """Return a copy with other values."""
    copy = type(message)()
    copy.CopyFrom(message)
    for name in fields:
        copy.ClearField(name)
    copy.MergeFrom(type(message)(**fields))
    for name, value in fields.items():
        if isinstance(value, int | float | str):
            setattr(copy, name, value)
    return copy
