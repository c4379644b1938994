"""Write a tokenizer.json whose ids are single characters, for targets with a small vocabulary."""

from __future__ import annotations

import json

END = 7
"""The id that ends a sequence."""
CHARACTERS = 'abcdefg\x00hijklmnopqrstuvwxyz0123456789{}[]":,.-+ _ABCDEFGHIJKLMNO'[:64]
"""Of each id; the one at END is not used."""


def tokenizer_json() -> str:
    """Return it: BPE without merges, on bytes."""
    pieces = {("Ġ" if character == " " else character): i for i, character in enumerate(CHARACTERS) if i != END}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": END,
                    "content": "</s>",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {**pieces, "</s>": END},
                "merges": [],
            },
        }
    )
