"""Define the errors of stages, by which the loop decides whether to try again.

    StageFailed                 another try may help
        PermanentFailure        another try would fail in the same way
            GgufError           a model cannot be written as GGUF, or a GGUF file cannot be read as a model
        TooLittleTraffic        another try needs more traffic

A stage's process ends with the exit status of its error, and the loop raises that error again.
"""

from __future__ import annotations


class StageFailed(Exception):
    """A stage ended without its result; the message says why."""

    exit_status = 1


class PermanentFailure(StageFailed):
    """A stage would fail again in the same way."""

    exit_status = 3


class GgufError(PermanentFailure):
    """A model and a GGUF file cannot be converted faithfully."""


class TooLittleTraffic(StageFailed):
    """A stage needs more traffic; the message says how much is missing."""

    exit_status = 4
