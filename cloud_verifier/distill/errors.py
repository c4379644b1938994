"""Define the errors of stages, by which the loop decides whether to try again.

PermanentFailure      another try would fail in the same way
    GgufError         a model cannot be written as GGUF, or a GGUF file cannot be read as a model
TooLittleTraffic      another try needs more traffic
"""

from __future__ import annotations

PERMANENT_FAILURE = 3
"""Exit status of a stage after PermanentFailure."""
TOO_LITTLE_TRAFFIC = 4
"""Exit status of a stage after TooLittleTraffic."""


class PermanentFailure(ValueError):
    """A stage would fail again in the same way; the message says why."""


class GgufError(PermanentFailure):
    """A model and a GGUF file cannot be converted faithfully; the message says why."""


class TooLittleTraffic(Exception):
    """A stage needs more traffic; the message says how much is missing."""
