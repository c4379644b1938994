from __future__ import annotations

import sys
from pathlib import Path

# Tiny targets, the scripted verifier and drafts of the edge tests, and the GGUF writer that their tokenizer comes from.
for folder in ("cloud", "edge", "llama"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
