"""Write a tiny Llama with random weights and a byte-level BPE vocabulary as GGUF: engine tests need no training."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
CONTEXT = 512
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
SPECIAL = ["<|end|>", "<|user|>"]
PADDING = 3
TEMPLATE = "{{ raise_exception('never run this') }}"


def byte_letters() -> dict[int, str]:
    """Return GPT-2's printable letter for every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    for i, byte in enumerate(b for b in range(256) if b not in letters):
        letters[byte] = chr(256 + i)
    return letters


def vocabulary(sentencepiece: bool = False) -> tuple[list[str], list[int]]:
    """Return the tokens as the GGUF spells them, and their types: a byte-level vocabulary, or one of SentencePiece."""
    if sentencepiece:
        kinds = gguf.TokenType
        spelt = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
        spelt += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
        spelt += [("\u2581", kinds.NORMAL), ("\u2581a", kinds.NORMAL), ("\u2581\u2581", kinds.USER_DEFINED)]
        return [token for token, _ in spelt], [int(kind) for _, kind in spelt]
    normal = [letter for _, letter in sorted(byte_letters().items())] + [merge.replace(" ", "") for merge in MERGES]
    padding = [f"[PAD{i}]" for i in range(PADDING)]
    types = [gguf.TokenType.NORMAL] * len(normal)
    types += [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.UNUSED] * PADDING
    return normal + SPECIAL + padding, [int(kind) for kind in types]


def write_tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    nan: bool = False,
    template: str = TEMPLATE,
    layers: int = LAYERS,
    epsilon: float = 1e-5,
    rope: int = HEAD_DIM,
    sentencepiece: bool = False,
) -> Path:
    """Write a file of about 400 kB. `nan` damages one weight in a way that only a check of the tensors finds.

    layers, epsilon, rope: what the header says, whatever the tensors are.
    """
    tokens, types = vocabulary(sentencepiece)
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(rope)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if sentencepiece:
        writer.add_token_scores([0.0] * len(tokens))
    else:
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(MERGES)
    writer.add_eos_token_id(tokens.index("</s>" if sentencepiece else SPECIAL[0]))
    writer.add_chat_template(template)

    def add(name: str, *shape: int) -> None:
        weight = rng.normal(0.0, 1.5 * shape[-1] ** -0.5, shape).astype(np.float32)
        if len(shape) == 1:
            weight = 1.0 + 0.1 * weight
        if nan and name == "blk.0.ffn_up.weight":
            weight[0, 0] = np.nan
        writer.add_tensor(name, weight.astype(np.float32))

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN)
        add(f"blk.{i}.attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
        add(f"blk.{i}.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"blk.{i}.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        add(f"blk.{i}.ffn_gate.weight", FFN, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", FFN, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
