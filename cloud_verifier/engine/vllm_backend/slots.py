"""Count the memory of vLLM's KV cache in slots, as the settings of a verifier do.

Works on private interfaces of vLLM 0.32, see `vllm_backend.SUPPORTED`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

KV_SLOTS = "outrider_kv_slots"
"""Key, in vLLM's additional configuration, of the number of tokens whose keys and values are held."""


def bytes_of_slots(vllm_config: Any, layers: dict[str, Any]) -> int | None:
    """Return the bytes of as many slots as the configuration says; None if it says nothing.

    layers: name -> vLLM's description of its cache. A block holds keys and values of one kind of layers alone, such as
    those with a sliding window, and all blocks come from one pool: so the slots take blocks of every kind, as many as
    that number of tokens takes, or the longest sequence if that is more.
    """
    slots = (vllm_config.additional_config or {}).get(KV_SLOTS)
    if slots is None:
        return None
    register_all_kvcache_specs(vllm_config)
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, layers)
    blocks = 1  # vLLM never uses the first one
    for spec in (group.kv_cache_spec for group in groups):
        longest = -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
        blocks += max(longest, -(-slots // spec.block_size))
    size: int = kv_cache_utils._pool_bytes_per_block(vllm_config, groups)
    return blocks * size
