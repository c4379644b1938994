"""Draft sources: `base` defines the interface, each other module implements one way to propose tokens."""

from edge_agent.drafting.sources.base import DraftSource, DraftTask, NodeContext, Proposal

__all__ = ["DraftSource", "DraftTask", "NodeContext", "Proposal"]
