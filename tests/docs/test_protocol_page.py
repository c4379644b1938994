"""Test that docs/protocol.md names the same errors and bounds as the code has."""

from __future__ import annotations

import math
import re

import pytest
from pages import text_of

from cloud_verifier.front import session_stream
from cloud_verifier.front.service import OPEN_TIMEOUT_S
from cloud_verifier.front.session_stream import BURST, MESSAGES_PER_S
from edge_agent.sdk.sessions import RESUME_BUDGET_S
from edge_agent.session.failover import next_attach
from edge_agent.session.stream import SILENCE_S
from outrider.core.errors import ANSWERS, OutriderError
from outrider.core.protocol import messages
from outrider.core.sampling import MAX_BIASES
from outrider.wire import channels, checks

TEXT = text_of("docs/protocol.md")
ROWS = dict(re.findall(r"^\| `?([^|]+?)`? \| ([^|]+) \|", TEXT, re.MULTILINE))
DOCUMENTED = {
    error: (status, next_)
    for error, status, next_ in re.findall(r"^\| `(\w+)` \| ([A-Z_]+) \| (\w+)", TEXT, re.MULTILINE)
}


def test_every_error_is_documented_with_its_status_and_what_a_device_does_next():
    named = {cls for cls in ANSWERS if cls is not OutriderError}
    assert {cls.__name__: (ANSWERS[cls].grpc, next_attach(cls("..."))) for cls in named} == DOCUMENTED


@pytest.mark.parametrize(
    ("field", "bound"),
    [
        ("open.session_id", messages.MAX_SESSION_ID),
        ("outrider-ticket-bin", checks.MAX_TICKET_BYTES),
        ("open.vocabulary_hash", checks.MAX_HASH_BYTES),
        ("attach.prompt", messages.MAX_PROMPT_TOKENS),
        ("attach.max_tokens", messages.MAX_GENERATED_TOKENS),
        ("attach.stop_token_ids", messages.MAX_STOP_TOKENS),
        ("attach.logprobs", messages.MAX_LOGPROBS),
        ("attach.prompt_logprobs", messages.MAX_LOGPROBS),
        ("attach.prompt_logprobs", messages.MAX_PROMPT_LOGPROBS),
        ("sampling.bias", MAX_BIASES),
        ("nodes of an Append", messages.MAX_APPEND_NODES),
    ],
)
def test_a_bound_is_the_one_in_the_code(field, bound):
    assert str(bound) in re.findall(r"\d+", ROWS[field])


def test_what_is_said_of_the_transport_is_so():
    assert f"at most {channels.MAX_MESSAGE_BYTES >> 20} MiB, metadata {channels.MAX_METADATA_BYTES >> 10} KiB" in TEXT
    assert f"within {OPEN_TIMEOUT_S:.0f} s" in TEXT
    assert f"for\n{session_stream.SILENCE_S:.0f} s loses its place" in TEXT
    assert f"at {MESSAGES_PER_S:.0f} messages a second after a burst of {BURST}" in TEXT
    assert f"{SILENCE_S} s" in TEXT
    assert math.inf == RESUME_BUDGET_S
