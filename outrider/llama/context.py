"""What the decoders have in common: a context of llama.cpp over a borrowed model, made and freed in one place."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import BadRequest, InternalError, ModelRefused
from outrider.llama.adapter import LoraAdapter
from outrider.llama.library import errors_collected, library
from outrider.llama.model import LlamaModel

Logits = NDArray[np.float32]

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ: greater ids abort the process


def parameters(*, cells: int, sequences: int, batch: int, threads: int) -> Any:
    """What every decoder asks of llama.cpp. sequences: at most one row of logits of each comes of a decode."""
    lib = library()
    params = lib.llama_context_default_params()
    params.n_ctx = cells
    params.n_batch = params.n_ubatch = batch
    params.n_seq_max = params.n_outputs_max = sequences
    params.n_threads = params.n_threads_batch = threads
    params.swa_full = True  # positions are taken back, so none may be forgotten
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # up to 9x slower for trees, less exact
    return params


class LlamaContext:
    """A context of llama.cpp, which keeps its model in memory. Use as a context manager."""

    def __init__(self, model: LlamaModel, params: Any) -> None:
        """Raises ModelRefused where llama.cpp makes no context."""
        self._lib = library()
        self._model = model
        self._vocab = model.vocab_size
        handle = model.borrow()
        with errors_collected() as errors:
            self._context: Any = self._lib.llama_init_from_model(handle, params)
        if not self._context:
            model.give_back()
            raise ModelRefused(f"no context for {model.path}: {'; '.join(errors) or 'llama.cpp gave no reason'}")

    @property
    def vocab_size(self) -> int:
        """V: width of a row of logits."""
        return self._vocab

    def adapt(self, adapter: LoraAdapter | None, scale: float = 1.0) -> None:
        """Decode with the model's weights as the adapter changes them from now on, or with None as they are.

        What is in the cache was computed with other weights and stays: fill it anew.
        Raises BadRequest for another model's adapter.
        """
        if adapter is not None and adapter.model is not self._model:
            raise BadRequest(f"{adapter.path} was loaded for {adapter.model.path}, this is {self._model.path}")
        handles = [] if adapter is None else [adapter.handle]
        array = (self._lib.llama_adapter_lora_p_ctypes * len(handles))(*handles)
        scales = (ctypes.c_float * len(handles))(*[scale] * len(handles))
        if self._lib.llama_set_adapters_lora(self._context, array, len(handles), scales) != 0:
            raise InternalError("llama.cpp did not take the adapter, which it had loaded")

    def _logits(self, rows: int) -> Logits:
        """A copy of the last decode's logits `[rows, V]`: llama.cpp's own array lives until the next decode."""
        return np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), shape=(rows, self._vocab)).copy()

    def close(self) -> None:
        """Free the context. Closing twice is harmless."""
        if self._context:
            self._lib.llama_free(self._context)
            self._context = None
            self._model.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
