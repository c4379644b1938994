"""Decide which architectures the engine serves; every sentence with which it refuses one stands in this module.

A refusal names the model, says in one clause what about it cannot be served and why, and what to do instead. The note
of a refused family in docs/models.md is that clause, word for word.
"""

from __future__ import annotations

from typing import Any

from outrider.core.errors import ModelRefused

SERVED_LAYERS = ("full_attention", "sliding_attention")
STATE_LAYERS = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Types of layers that carry a state from token to token."""
BATCH_ROPE = ("dynamic", "longrope")
"""Rotary positions whose frequencies transformers changes for a whole batch once one sequence of it is long."""

OTHER_MODEL = "choose a model type that docs/models.md lists as served, or try --engine vllm"


def refused(label: str, why: str, facts: str = "") -> ModelRefused:
    """Return the error for a model. why: one of the clauses below. facts: what was found in it, as types of layers."""
    found = f" ({facts})" if facts else ""
    return ModelRefused(f"{label} cannot be served: {why}{found}; {OTHER_MODEL}")


UNKNOWN_TYPE = "transformers has no text model of this type, and no code from a model's folder is run"
RUNNING_STATE = (
    "it has layers that keep a running state of the sequence, from which a rejected draft token cannot be removed"
)
UNKNOWN_LAYERS = "it has layers with a kind of attention that the engine does not compute"
OWN_ATTENTION = "it computes attention in code of its own, which cannot use the engine's slots for keys and values"
OTHER_LAYERS = "not all of its layers call the attention that they are given"
OWN_MASK = "it gives its attention a mask of its own, and the engine masks the branches of token trees itself"
POSITION_BIAS = "it adds a bias to its attention scores, which the engine does not compute"
LOST_WINDOW = (
    "it has a sliding window that it does not hand to its attention, so that a token would see others beyond the window"
)
ALL_LOGITS = "it computes the logits of all tokens where those of a few are asked for"
FAILING = "its forward pass fails on a batch as the engine packs it"
FAILING_TREES = "its forward pass fails on token trees"
DEVIATING = "its logits for the nodes of a token tree and for plain sequences differ"


def check_layers(module: Any, label: str) -> None:
    """Raise ModelRefused for layers that the numerics check, with its short sequences, may not notice."""
    stated = getattr(module.config.get_text_config(), "layer_types", None)
    kinds = set(stated or ()) - set(SERVED_LAYERS)
    facts = ", ".join(sorted(kinds))
    # transformers calls a whole family stateful, though some of its models have layers of attention alone.
    if kinds.intersection(STATE_LAYERS) or (getattr(module, "_is_stateful", False) and not stated):
        raise refused(label, RUNNING_STATE, facts)
    if kinds:
        raise refused(label, UNKNOWN_LAYERS, facts)


def longest_sequence(config: Any) -> int:
    """Return the most positions that a sequence may have, prompt and output together.

    With longrope a sequence ends where the frequencies would change: beyond, the length of one session would change the
    tokens of another. With dynamic positions that is `max_position_embeddings` itself.
    """
    stated = int(getattr(config, "max_position_embeddings", None) or 131_072)
    ropes = getattr(config, "rope_parameters", None) or {}  # of all layers, or by type of layer
    each = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
    return min(
        [stated, *(int(r["original_max_position_embeddings"]) for r in each if r.get("rope_type") == "longrope")]
    )


def fix_rope(module: Any) -> None:
    """Keep BATCH_ROPE at the frequencies of sequences up to `longest_sequence`, without a look at each batch."""
    for part in module.modules():
        kind = getattr(part, "rope_type", None)
        if isinstance(kind, dict):
            part.rope_type = {layers: "default" if one in BATCH_ROPE else one for layers, one in kind.items()}
        elif kind in BATCH_ROPE:
            part.rope_type = "default"
