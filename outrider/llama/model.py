"""Load draft models from GGUF files, with their vocabulary, and quantise such files."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from pathlib import Path
from typing import Any, Literal, Self

from outrider.artifacts import atomic_files
from outrider.artifacts.model_files import check_gguf
from outrider.core.errors import BadRequest, InternalError, ModelRefused
from outrider.core.vocabulary import raw_bytes
from outrider.llama.library import errors_collected, library

QuantKind = Literal["Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "F16"]

_MAX_ERRORS = 3
"""Most lines of llama.cpp's in an error: it has one for each damaged tensor, of which there may be hundreds."""


class LlamaModel:
    """A GGUF model that is in memory. Contexts borrow it; it is freed when it and the last of its contexts are closed.

    It may be loaded on any thread and shared by contexts on several. The file is memory-mapped: replace it by a new
    file, since truncating it in place kills the process. The GGUF's own chat template is never executed.
    """

    def __init__(self, handle: Any, path: Path, threads: int) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._users = 1
        self._closed = False
        self.path = path
        self.threads = threads
        """CPU threads of a decode of a tree."""

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, threads: int = 1) -> LlamaModel:
        """Load and check a GGUF file, with its weights: llama.cpp accepts NaN and invalid blocks unless it is asked to.

        Raises ModelRefused with the reason, BadRequest for `threads`, ImportError without `outrider[edge]`.
        """
        cores = os.cpu_count() or 1
        if not 1 <= threads <= cores:
            raise BadRequest.bound("threads", threads, f"between 1 and {cores}, the machine's cores")
        path = Path(path)
        check_gguf(path, "the draft")
        lib = library()
        params = lib.llama_model_default_params()
        params.check_tensors = True
        # GCC 12 and older compile ggml's tile configuration away, and a CPU with AMX then crashes in the first wide
        # decode of quantised weights (llama.cpp issue 20824). Elsewhere these buffers make such weights faster.
        params.use_extra_bufts = b"AMX_INT8 = 1" not in lib.llama_print_system_info()
        with errors_collected() as errors:
            handle = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not handle:
            raise ModelRefused(
                f"{path} cannot be loaded: {'; '.join(errors[:_MAX_ERRORS]) or 'llama.cpp gave no reason'}"
            )
        model = cls(handle, path, threads)
        try:
            model._check_kind()
        except ModelRefused:
            model.close()
            raise
        return model

    def _check_kind(self) -> None:
        """Refuse models without a KV cache from which positions can be removed, which the tree decoder needs."""
        lib = library()
        kinds = {
            "an encoder": lib.llama_model_has_encoder,
            "a recurrent model": lib.llama_model_is_recurrent,
            "a hybrid model": lib.llama_model_is_hybrid,
            "a diffusion model": lib.llama_model_is_diffusion,
        }
        for kind, holds in kinds.items():
            if holds(self._handle):
                raise ModelRefused(f"{self.path} is {kind}; a draft must be a decoder with attention in every layer")
        if lib.llama_vocab_type(self._vocab) == lib.LLAMA_VOCAB_TYPE_NONE:
            raise ModelRefused(f"{self.path} has no vocabulary; export it with its tokenizer")

    @property
    def handle(self) -> Any:
        """Return the pointer for llama.cpp. Raises InternalError after `close`."""
        if self._closed:
            raise InternalError(f"the model {self.path} is closed")
        return self._handle

    @property
    def _vocab(self) -> Any:
        return library().llama_model_get_vocab(self.handle)

    @functools.cached_property
    def vocab_size(self) -> int:
        """Return V, the width of a row of logits, padding ids included."""
        return int(library().llama_vocab_n_tokens(self._vocab))

    @functools.cached_property
    def n_ctx_train(self) -> int:
        """Return the number of positions that the model was trained for."""
        return int(library().llama_model_n_ctx_train(self.handle))

    def token_bytes(self, batch: int = 512) -> int:
        """Return the bytes that a context takes for each of its tokens, nearly: keys and values in float16, and for
        attention without flash kernels a column of scores for each of the `batch` tokens of a decode."""
        lib = library()
        layers, heads = lib.llama_model_n_layer(self.handle), lib.llama_model_n_head(self.handle)
        width = int(self._metadata("attention.key_length") or lib.llama_model_n_embd(self.handle) // heads)
        return int(4 * layers * lib.llama_model_n_head_kv(self.handle) * width + 4 * batch * heads)

    def _metadata(self, name: str) -> str:
        """Return the value of a key of the model's architecture; "" where the file has none."""
        lib, buffer = library(), ctypes.create_string_buffer(256)

        def value(key: str) -> str:
            length = lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
            return buffer.value.decode(errors="replace") if length >= 0 else ""

        return value(f"{value('general.architecture')}.{name}")

    # --- vocabulary

    def token_table(self) -> list[bytes]:
        """Return the raw bytes of every token id, to be compared with the target's, which are read in the same way.

        A control token is its text; an unused (padding) id is empty. Of byte-level and SentencePiece vocabularies these
        are the bytes of the text that the token stands for, not of its spelling in the vocabulary.
        """
        lib, vocab = library(), self._vocab
        byte_level = lib.llama_vocab_type(vocab) == lib.LLAMA_VOCAB_TYPE_BPE
        table = []
        for token in range(self.vocab_size):
            spelt, kind = lib.llama_vocab_get_text(vocab, token), lib.llama_vocab_get_attr(vocab, token)
            if kind & (lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN):
                table.append(spelt)
            elif kind & lib.LLAMA_TOKEN_ATTR_UNUSED:
                table.append(b"")
            else:
                table.append(raw_bytes(spelt.decode(errors="replace"), byte_level=byte_level))
        return table

    def special_ids(self) -> set[int]:
        """Return the ids of control and added tokens."""
        lib, vocab = library(), self._vocab
        kinds = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
        return {token for token in range(self.vocab_size) if lib.llama_vocab_get_attr(vocab, token) & kinds}

    # --- lifetime

    def acquire(self) -> Any:
        """Return the pointer, kept alive until `release`: freeing a model before its contexts kills the process."""
        with self._lock:
            handle = self.handle
            self._users += 1
            return handle

    def release(self) -> None:
        """End one use of the pointer."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                library().llama_model_free(self._handle)

    def close(self) -> None:
        """Allow no new contexts; the memory is freed with the last one. Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def quantize(
    source: Path, destination: Path, kind: QuantKind, threads: int = 1, *, embeddings: str | None = None
) -> None:
    """Write a GGUF file quantised to `destination`, which appears whole or not at all.

    embeddings: ggml's type of the embeddings and the output layer; None lets llama.cpp choose one wider than `kind`.
    llama.cpp silently stores a tensor wider than asked for where its rows do not fit the blocks of `kind`: compare the
    tensor types that came out. Raises ModelRefused if llama.cpp refuses the file.
    """
    lib = library()
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if embeddings is not None:
        params.token_embedding_type = params.output_tensor_type = getattr(lib, f"GGML_TYPE_{embeddings}")
    params.nthread = threads
    # Never truncate a file in place: a process that has mapped it would die of SIGBUS.
    with atomic_files.replacing(destination) as partial:
        code = lib.llama_model_quantize(os.fsencode(source), os.fsencode(partial), params)
        if code != 0:
            raise ModelRefused(
                f"llama.cpp could not quantise {source.name} to {kind} (code {code}): is it a whole GGUF file?"
            )
