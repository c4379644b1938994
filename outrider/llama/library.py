"""Import llama_cpp, in one place: set the environment first, then the log, then the backend."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("outrider.llama")

# ggml.h: 1 debug, 2 info, 3 warning, 4 error, 5 the rest of the line before. (llama-cpp-python has an older table.)
_CONTINUATION = 5
# llama.cpp reports its progress as "info" and harmless oddities as "warning"; a device's user needs neither.
_PYTHON_LEVELS = {3: logging.INFO, 4: logging.ERROR}


class _Lines(threading.local):
    """Holds the level of llama.cpp's last line on this thread, and its error lines while they are collected."""

    level = 0
    errors: list[str] | None = None


_lines = _Lines()
_loading = threading.Lock()


def library() -> Any:
    """Return the bindings `llama_cpp.llama_cpp`, ready to use. Raises ImportError that names the extra to install."""
    # `cache` alone lets two threads load at once: the second callback would free the first while llama.cpp calls it.
    with _loading:
        return _load()


@functools.cache
def _load() -> Any:
    # Threads that spin for work starve a busy machine; both settings are read when the library is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        bindings: Any = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError as error:
        raise ImportError(
            f"llama-cpp-python cannot be imported ({error}); a draft model needs it: pip install 'outrider[edge]'"
        ) from error
    # llama.cpp keeps no reference of its own, and would call freed memory.
    bindings.outrider_log_callback = bindings.llama_log_callback(_log)
    bindings.llama_log_set(bindings.outrider_log_callback, ctypes.c_void_p(0))
    bindings.llama_backend_init()
    return bindings


def _log(level: int, text: bytes, _user_data: object) -> None:
    level = _lines.level if level == _CONTINUATION else level
    _lines.level = level
    line = text.decode("utf-8", errors="replace").strip()
    if not line:
        return
    python_level = _PYTHON_LEVELS.get(level, logging.DEBUG)
    if python_level == logging.ERROR and _lines.errors is not None:
        _lines.errors.append(line)  # the caller puts them into an exception
    else:
        logger.log(python_level, "%s", line)


@contextmanager
def errors_collected() -> Iterator[list[str]]:
    """Collect the error lines that llama.cpp writes on this thread, instead of logging them."""
    before, _lines.errors = _lines.errors, []
    try:
        yield _lines.errors
    finally:
        _lines.errors = before
