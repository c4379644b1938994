"""Turn the target's own outputs into better drafts."""
