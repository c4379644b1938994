"""Choose how many levels to draft by UCB-SpecStop, a bandit that knows nothing but what its own choices have brought.

UCB-SpecStop (arXiv 2606.20591, "Delay-Adaptive Speculation Control for Low-Latency Edge-Cloud LLM Inference") is
written here anew from the paper's abstract and from the rule in the authors' repository (szpsunkk/UCB-SpecStop at
0653282); the paper's text was not at hand. Known from there: an arm is a draft length from 1 to 10, so that plain
streaming is none; a device tries each arm once, in rising order, and then takes the least
(S - beta sqrt(n ln t)) / A, where S is the milliseconds of an arm's n rounds, A the tokens that they brought, t the
number of the next round and beta = 1; nothing is forgotten. The authors' variant with one bandit for each state of a
channel needs to know that state, and is left out.

Ours is that an arm stands for levels of a token tree rather than for tokens of a chain, and that a decision may hold
for several verification steps, which then count as as many rounds.
"""

from __future__ import annotations

import math

MOST_LEVELS = 10
"""Longest draft that the authors' measurements on real devices allow."""
BETA_S = 1e-3
"""Weight of the exploration in them."""


class UcbSpecStop:
    """Chooses the levels of the next round, and learns what they brought."""

    def __init__(self, most: int = MOST_LEVELS, beta_s: float = BETA_S) -> None:
        self._beta_s = beta_s
        self._rounds = [0] * most
        self._seconds = [0.0] * most
        self._tokens = [0.0] * most

    def choose(self) -> int:
        """Return the levels that promise the fewest seconds per token, 1 to `most`."""
        if 0 in self._rounds:
            return self._rounds.index(0) + 1
        log_t = math.log(1 + sum(self._rounds))
        arms = zip(self._rounds, self._seconds, self._tokens, strict=True)
        indices = [(seconds - self._beta_s * math.sqrt(n * log_t)) / tokens for n, seconds, tokens in arms]
        return indices.index(min(indices)) + 1

    def observe(self, levels: int, seconds: float, tokens: float, rounds: int = 1) -> None:
        """Learn what so many rounds with these levels took and brought. Rounds without a token say nothing."""
        if tokens > 0.0 and rounds > 0:
            self._rounds[levels - 1] += rounds
            self._seconds[levels - 1] += seconds
            self._tokens[levels - 1] += tokens
