"""Draft sources: whoever proposes nodes for the one tree. `base` the seam, and an implementation per file."""

from edge_agent.drafting.sources.base import DraftSource, DraftTask, NodeContext, Proposal

__all__ = ["DraftSource", "DraftTask", "Proposal", "NodeContext"]
