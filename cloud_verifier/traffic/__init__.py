"""The traffic log: what recorded sessions' targets produced, for drafts to learn from (docs/traffic.md)."""
