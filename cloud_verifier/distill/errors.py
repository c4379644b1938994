"""Define the errors of stages; the loop tries a stage that raised one again, a few times."""

from __future__ import annotations


class StageFailed(Exception):
    """A stage ended without its result; the message says why."""


class GgufError(StageFailed):
    """A model and a GGUF file cannot be converted faithfully."""
