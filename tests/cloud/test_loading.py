"""What an operator reads while a target loads."""

from __future__ import annotations

import logging

from cloud_verifier.front.startup import PROGRESS_EVERY_S, Progress


def test_phases_are_logged_at_once_and_shares_at_a_bounded_rate(caplog):
    now = 0.0
    progress = Progress(clock=lambda: now)
    with caplog.at_level(logging.INFO):
        progress("hashing weights: 10 MB")
        for share in range(100):
            now += PROGRESS_EVERY_S / 50
            progress(f"hashing weights: {share} %")
        progress("loading t as float32 on cpu")
    lines = [record.message for record in caplog.records]
    assert lines[0] == "hashing weights: 10 MB"
    assert lines[-1] == progress.phase == "loading t as float32 on cpu"
    assert 3 <= len(lines) <= 4


def test_the_phase_is_the_newest_though_its_line_was_left_out(caplog):
    progress = Progress(clock=lambda: 0.0)
    with caplog.at_level(logging.INFO):
        progress("hashing weights: 1 %")
        progress("hashing weights: 2 %")
    assert len(caplog.records) == 1
    assert progress.phase == "hashing weights: 2 %"
