"""Parse what a target writes into content, reasoning and tool calls, while it comes; pure, and without I/O."""
