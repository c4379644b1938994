"""Record what the targets of consenting tenants' sessions produced, for drafts to learn from (docs/traffic.md)."""
