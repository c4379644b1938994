"""Tell texts apart that are easy to guess: those that repeat themselves, and those that quote their prompt."""

from __future__ import annotations

from collections.abc import Sequence

REPETITIVE = 0.30
APART = "repetitive"
"""The group of texts that repeat themselves, of any sampling."""
QUOTE = 3
"""Tokens before a token that have to stand in the prompt, too, for it to count as quoted."""


def repetitive(tokens: Sequence[int]) -> bool:
    """Return whether more than 30% of the 4-grams occurred before. An output that runs in a loop is one, and so is one
    that goes on in a list of alike things; benchmarks count both apart."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return bool(grams) and 1 - len(set(grams)) / len(grams) > REPETITIVE


def grouped(kind: str, sampling: str, output: Sequence[int]) -> str:
    """Return the name under which a text is counted: its kind, and its sampling or, if it repeats itself, that."""
    return f"{kind}, {APART if repetitive(output) else sampling}"


def groups_of(name: str) -> tuple[str, ...]:
    """Return what a text of this name counts for: the name and, unless it repeats itself, its kind as a whole."""
    kind, _, group = name.partition(", ")
    return (name,) if group in ("", APART) else (kind, name)


def quoted(prompt: Sequence[int], output: Sequence[int], order: int = QUOTE) -> float:
    """Return the share of the output's tokens that continue the prompt: the `order` tokens before such a token, and the
    token itself, stand somewhere in the prompt in a row. It is 0 for an output without tokens."""
    grams = {tuple(prompt[i : i + order + 1]) for i in range(len(prompt) - order)}
    whole, begin = (*prompt, *output), len(prompt)
    found = sum(tuple(whole[i - order : i + 1]) in grams for i in range(max(begin, order), len(whole)))
    return found / len(output) if output else 0.0
