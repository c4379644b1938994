"""Define the options that a caller passes to a client, and the results that the client returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypedDict

from pydantic import ConfigDict, Field

from edge_agent.session.statistics import Statistics, Usage
from outrider.core.errors import OutriderError
from outrider.core.protocol.messages import TokenLogprobs

Prompt = str | Sequence[int]
FinishReason = Literal["eos", "length", "stop", "cancelled"]
Provenance = Literal["draft", "target"]
"""Origin of a token: a proposal of this device, or the target itself. As long as `verified` is true and `lossy` is not,
the target alone would have produced the same token, or in 16 bits one of the same distribution."""
AcceptanceRule = Literal["coupled", "typical"]
"""Which draft tokens the target accepts: its own ones, or also others that it finds likely."""
Offline = Literal["raise", "draft_only"]
"""Behaviour while no verifier can be reached: raise Unavailable, or let the draft model write alone."""


@dataclass(frozen=True)
class Timeout:
    """Limits a request's time, in seconds from the call on; None is no limit.

    They include everything: loading the draft for the first time, waiting for room, and further tries.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, revalidate_instances="always")

    total: Annotated[float | None, Field(gt=0.0, allow_inf_nan=False)] = 600.0
    """Time until the last token."""
    first_token: Annotated[float | None, Field(gt=0.0, allow_inf_nan=False)] = 120.0
    """Time until the first token."""


DEFAULT_TIMEOUT = Timeout()
DEFAULT_RETRIES = 2


class Options(TypedDict, total=False):
    """Keyword arguments that the client's methods take; SamplingParams explains those of sampling.

    max_tokens: most tokens to generate, 256 by default, as far as the target has room for them; None: as many
        as it has room for. Verifiers reserve room for 4,096 at a time, or a quarter of what the target can hold if
        that is more; the output ends there if they have no more, or `timeout` would not suffice for it.
    seed: 64 bits, random by default.
    stop: texts that end the output and are not part of it.
    stop_token_ids: ids that end the output as the target's own end does; at most 64.
    ignore_eos: continue past the target's own end.
    speculation: False generates without draft tokens, neither this device's nor the verifier's, to measure what these
    gain. The tokens are the same, or in 16 bits of the same distribution.
    min_tokens: neither the target's own end nor a stop id comes before so many tokens, as far as there is room for
    them, and a stop text that is complete by then does not count.
    acceptance_rule: "coupled" by default: the output is the target's own. "typical" also accepts other draft tokens
    that the target finds likely: more tokens per step, but the output is not the target's own any more, and is marked
    as `lossy`. A verifier refuses it unless its operator allows it.
    typical_epsilon, typical_delta: for "typical": a draft token of probability p, where the target's distribution has
    the entropy H, is accepted if p > min(epsilon, delta * exp(-H)); 0.09 and 0.3 by default.
    grammar: what the output must follow, which `json_schema`, `regex`, `choice` and `gbnf` of edge_agent.sdk.grammars
    make.
    logprobs: return the target's log-probability of each token, with this many of its likeliest alternatives (0 to 20);
    None returns none, which is faster.
    prompt_logprobs: return the same for each token of the prompt; max_tokens may be 0 then, which generates nothing.
    logit_bias: token id -> what is added to its logit.
    traffic_class, timeout, retries, offline: as for the client, for this request alone.
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    speculation: bool
    traffic_class: str
    timeout: Timeout | float | None
    retries: int
    offline: Offline
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: Mapping[int, float] | None
    grammar: str
    min_tokens: int
    acceptance_rule: AcceptanceRule
    typical_epsilon: float
    typical_delta: float


@dataclass(frozen=True)
class Chunk:
    """The tokens that one Commit brought, or one that the draft wrote alone."""

    text: str
    """May be empty: a character or a stop string may still be incomplete."""
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    """Per token, whether this device had proposed it, in a step with enough of its nodes; see `provenance`."""
    verified: bool = True
    """False: the draft wrote it alone, since no verifier could be reached; the target may have said something else."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Per token; None unless asked for."""
    lossy: bool = False
    """Whether the request's acceptance rule lets draft tokens change the output."""

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """Return the origin of each token."""
        return tuple("draft" if own else "target" for own in self.drafted)


@dataclass(frozen=True)
class Completion:
    """Holds the result of a request."""

    text: str
    """The output, without the prompt and without a stop text."""
    token_ids: tuple[int, ...]
    """The output as token ids."""
    drafted: tuple[bool, ...]
    """Per token, as in Chunk."""
    verified: bool
    """Whether all of it is the target's; False where the draft has written some of it alone."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """Per token, as in Chunk."""
    finish_reason: FinishReason
    """"eos" (the target's own end, or a stop id), "length", "stop" (a stop text) or "cancelled"."""
    usage: Usage
    seed: int
    """Gives the same tokens again with the same target, prompt and parameters, if the target computes in float32. In 16
    bits rounding may decide otherwise between tokens that are nearly as likely."""
    session_id: str
    """The session's name in the logs of coordinator and verifier."""
    statistics: Statistics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Per token of the prompt, None for the first, before which nothing stands; None unless asked for, or not there
    yet."""
    acceptance_rule: AcceptanceRule = "coupled"
    """The acceptance rule of the request."""

    @property
    def lossy(self) -> bool:
        """Return whether the acceptance rule lets draft tokens change the output: then it is not the target's own."""
        return self.acceptance_rule != "coupled"

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """Return the origin of each token."""
        return tuple("draft" if own else "target" for own in self.drafted)


@dataclass(frozen=True)
class SkeletonPoint:
    """Holds one point of an outline and what was written for it. Exactly one of `completion` and `error` is set."""

    number: int
    """Its place in the outline, from 1 on."""
    title: str
    """The point as the outline has it, without its number."""
    completion: Completion | None
    error: OutriderError | None = None
    """Why it could not be written; the other points are written all the same."""

    @property
    def text(self) -> str:
        """Return the title with its number and, below it, what was written; "" for a point that failed."""
        return "" if self.completion is None else f"{self.number}. {self.title}\n{self.completion.text.strip()}"


@dataclass(frozen=True)
class Skeleton:
    """Holds an answer that was written as an outline whose points were then expanded side by side.

    It is another answer than `chat` gives to the same messages: see `changes_answer`.
    """

    outline: Completion
    points: tuple[SkeletonPoint, ...]
    """The points that have ended, in the outline's order, those that failed included."""
    changes_answer: Literal[True] = True
    """Every token is the target's own choice after its prompt (unless it is `lossy`), but the prompts are not the
    caller's: one asks for an outline, and each of the others for one point, written without sight of what the others
    say."""

    @property
    def text(self) -> str:
        """Return the points in the outline's order, each below its title; those that failed are left out."""
        return "\n\n".join(point.text for point in self.points if point.completion is not None)

    @property
    def verified(self) -> bool:
        """Return whether all tokens are the target's; False where the draft has written some alone."""
        return all(one.verified for one in self._completions)

    @property
    def lossy(self) -> bool:
        """Return whether a lossy acceptance rule was asked for, so that not every token is the target's own choice."""
        return any(one.lossy for one in self._completions)

    @property
    def usage(self) -> Usage:
        """Return the tokens of all requests together: the shared beginning of the prompts counts in each."""
        usages = [one.usage for one in self._completions]
        return Usage(sum(one.prompt_tokens for one in usages), sum(one.completion_tokens for one in usages))

    @property
    def _completions(self) -> tuple[Completion, ...]:
        return (self.outline, *(point.completion for point in self.points if point.completion is not None))
