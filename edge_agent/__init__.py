"""The device: drafts ahead, streams guesses to a verifier, and delivers the target's own tokens.

Importing it loads neither llama.cpp nor a tokenizer; both are loaded when a target is first used.
"""

from edge_agent.client import AsyncClient
from edge_agent.completion import Chunk, Completion
from edge_agent.completion_stream import CompletionStream
from edge_agent.config import EdgeSettings
from edge_agent.statistics import Statistics, Usage

__all__ = [
    "AsyncClient",
    "Chunk",
    "Completion",
    "CompletionStream",
    "EdgeSettings",
    "Statistics",
    "Usage",
]
