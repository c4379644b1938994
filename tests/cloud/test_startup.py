"""Test the progress that an operator reads while a target loads."""

from __future__ import annotations

import logging

from cloud_verifier.front.startup import PROGRESS_EVERY_S, StartupService


def test_phases_are_logged_at_once_and_shares_at_a_bounded_rate(caplog):
    now = 0.0
    startup = StartupService(clock=lambda: now)
    with caplog.at_level(logging.INFO):
        startup.progress("hashing weights: 10 MB")
        for share in range(100):
            now += PROGRESS_EVERY_S / 50
            startup.progress(f"hashing weights: {share} %")
        startup.progress("loading t as float32 on cpu")
    lines = [record.message for record in caplog.records]
    assert lines[0] == "hashing weights: 10 MB"
    assert lines[-1] == startup.phase == "loading t as float32 on cpu"
    assert 3 <= len(lines) <= 4


def test_the_phase_is_the_newest_though_its_line_was_left_out(caplog):
    startup = StartupService(clock=lambda: 0.0)
    with caplog.at_level(logging.INFO):
        startup.progress("hashing weights: 1 %")
        startup.progress("hashing weights: 2 %")
    assert len(caplog.records) == 1
    assert startup.phase == "hashing weights: 2 %"
