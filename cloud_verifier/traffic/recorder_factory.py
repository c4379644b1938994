"""A verifier's recorder, as its settings want it. Needs pyarrow, which nothing else of a verifier does."""

from __future__ import annotations

import math

from cloud_verifier.config import VerifierConfig
from cloud_verifier.traffic.housekeeping import Housekeeper
from cloud_verifier.traffic.recorder import Recorder
from cloud_verifier.traffic.redaction import load
from cloud_verifier.traffic.segments import SegmentLog, SegmentWriter
from outrider.core.errors import BadRequest


class KeptRecorder(Recorder):
    """With somebody who keeps its log in order."""

    def __init__(self, config: VerifierConfig, verifier_id: str) -> None:
        """Raises BadRequest where there can be no log, or no hook, and ImportError where fsspec misses a package."""
        redact = load(config.traffic_redact) if config.traffic_redact else None
        try:
            segments = SegmentLog(config.traffic)
            # The recorder says when to write: it can wait for a store that refuses.
            writer = SegmentWriter(config.traffic, verifier_id=verifier_id, flush_tokens=1 << 62, flush_s=math.inf)
        except (OSError, ValueError) as error:
            raise BadRequest(
                f"traffic is {config.traffic!r}, where nothing can be written: {error}", field="traffic"
            ) from error
        super().__init__(
            writer,
            redact=redact,
            flush_s=config.traffic_flush_s,
            flush_tokens=config.traffic_flush_tokens,
            prompt_tokens=config.traffic_prompt_tokens,
        )
        self._keeper = Housekeeper(segments, config.traffic_max_bytes)

    def close(self) -> None:
        super().close()
        self._keeper.close()
