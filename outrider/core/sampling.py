"""Define the sampling parameters of a request and their bounds, its acceptance rule among them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import BadRequest, between

MAX_BIASES = 300
"""Token ids whose logits one request may change, as in OpenAI's API."""
MAX_BIAS = 100.0
MAX_GRAMMAR_BYTES = 1 << 17
MAX_DELTA = 1e9
"""At it `delta * exp(-entropy)` exceeds 1 in any vocabulary, so that `epsilon` alone decides."""
RULES = ("coupled", "typical")
"""Names of the acceptance rules; all but the first change the output."""


@dataclass(frozen=True)
class TypicalAcceptance:
    """Accepts a draft token that is not the target's own if the target finds it likely enough (Medusa, arXiv
    2401.10774): p > min(epsilon, delta * exp(-H)), where H is the entropy of the target's distribution p, in nats.

    With a great delta the threshold is fixed, which is the rollback of BiLD (arXiv 2302.07863).
    """

    epsilon: float = 0.09
    """Probability above which a token is accepted whatever the entropy is; at 1 only `delta` decides."""
    delta: float = 0.3
    """Share of exp(-H) above which a token is accepted."""

    def __post_init__(self) -> None:
        _within("typical_epsilon", self.epsilon, 0.0, 1.0)
        _within("typical_delta", self.delta, 0.0, MAX_DELTA)
        for name, value in (("typical_epsilon", self.epsilon), ("typical_delta", self.delta)):
            if value == 0.0:
                raise BadRequest.bound(name, value, "greater than 0: at 0 any token would be accepted")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters that choose a token from the target's distribution. Temperature 0 ignores top-k, top-p and min-p."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this much probability; 1 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 is off."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens in prompt or output (CTRL, arXiv 1909.05858); 1 is off."""
    presence_penalty: float = 0.0
    """Subtract this from tokens that occurred in the output; 0 is off."""
    frequency_penalty: float = 0.0
    """Subtract this for each time that the token occurred in the output; 0 is off."""
    seed: int = 0
    """64 bits; with the prompt's hash it keys the noise."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit); -100 all but bans a token."""
    grammar: str = ""
    """Lark text that the output follows; tokens that it forbids have no probability. Empty: any output."""
    typical: TypicalAcceptance | None = None
    """Accept likely draft tokens that are not the target's own, which changes the output; None: only its own ones."""

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _within("seed", self.seed, 0, 2**64 - 1)
        _check_bias(self.logit_bias)
        _check_grammar(self.grammar)
        if self.top_p == 0.0:
            raise BadRequest.bound("top_p", self.top_p, "greater than 0 (use temperature=0 for greedy)")
        if 0.0 < self.temperature < 1e-3:
            raise BadRequest.bound("temperature", self.temperature, "0 (greedy) or at least 0.001")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def rule(self) -> str:
        """Return the name of the acceptance rule, one of RULES."""
        return "coupled" if self.typical is None else "typical"

    @property
    def lossy(self) -> bool:
        """Return whether the acceptance rule lets draft tokens change the output."""
        return self.typical is not None

    @property
    def penalised(self) -> bool:
        """Return whether penalties or a bias change the logits."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.logit_bias
        )

    @property
    def filtered(self) -> bool:
        """Return whether top-k, top-p or min-p may drop tokens."""
        return not self.greedy and bool(self.top_k or self.top_p < 1.0 or self.min_p > 0.0)


def _within(field: str, value: float, low: float, high: float) -> None:
    kind, name = (int, "a whole number ") if isinstance(low, int) else (int | float, "a number ")
    if isinstance(value, bool) or not isinstance(value, kind):
        raise BadRequest.bound(field, repr(value)[:80], f"{name}between {low} and {high}")
    between(field, value, low, high)


def _check_grammar(grammar: str) -> None:
    try:
        size = len(grammar.encode())
    except UnicodeEncodeError as error:
        raise BadRequest(f"the grammar has a lone surrogate at character {error.start}", field="grammar") from None
    if size > MAX_GRAMMAR_BYTES:
        raise BadRequest.bound("bytes of the grammar", size, f"at most {MAX_GRAMMAR_BYTES}")


def _check_bias(bias: tuple[tuple[int, float], ...]) -> None:
    if len(bias) > MAX_BIASES:
        raise BadRequest.bound("number of ids in logit_bias", len(bias), f"at most {MAX_BIASES}")
    for token, value in bias:
        _within("a token id in logit_bias", token, 0, 2**31 - 1)
        _within("a value in logit_bias", value, -MAX_BIAS, MAX_BIAS)
    if len({token for token, _ in bias}) < len(bias):
        raise BadRequest("logit_bias names a token id twice", field="logit_bias")
