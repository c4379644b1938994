"""Keep n-gram stores: counts of what followed what in one tenant's earlier sessions, in a file that can be mapped.

The file is a safetensors file with the arrays of an `NgramTable`. A reader trusts nothing of it: every bound is checked
before an array is made, and the arrays are read once, so that no later look-up leaves them. Whatever a store holds, it
changes which tokens are proposed and never which are produced.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.artifacts import atomic_files
from outrider.core.errors import BadRequest, ModelRefused
from outrider.core.ngram import NgramTable

SUFFIX = ".safetensors"
MAX_BYTES = 256 << 20
"""Bytes of a store that is read."""
LEAST_SESSIONS = 2
"""No store holds n-grams of fewer sessions."""
_FORMAT = "outrider-ngrams-1"
_MAX_HEADER = 65_536
_TYPES = {"keys": "U64", "starts": "I64", "totals": "I64", "tokens": "I32", "counts": "I32"}
"""Array -> its type in the header, those with the widest items first, so that each is aligned to its items."""
_DTYPES: dict[str, np.dtype[Any]] = {"U64": np.dtype("<u8"), "I64": np.dtype("<i8"), "I32": np.dtype("<i4")}
_Header = dict[str, Any]


@dataclass(frozen=True)
class NgramStore:
    """The n-grams of one tenant's sessions with one target."""

    table: NgramTable
    weights_hash: str
    """Hash of the weights of the target that wrote the sessions."""
    tokenizer_hash: str
    """Hash of that target's token table."""
    tenant: str
    least_sessions: int
    """Each n-gram was in at least as many sessions."""
    sessions: int
    """Sessions that were read."""

    @property
    def size(self) -> int:
        """Return the bytes of its arrays."""
        return sum(array.nbytes for array in self.table.arrays().values())

    def save(self, path: Path) -> None:
        """Write the store in place of what is at `path`. Raises OSError."""
        arrays = self.table.arrays()
        facts = ("weights_hash", "tokenizer_hash", "tenant", "least_sessions", "sessions")
        header: _Header = {"__metadata__": {"format": _FORMAT, **{name: str(getattr(self, name)) for name in facts}}}
        end = 0
        for name, kind in _TYPES.items():
            begin, end = end, end + arrays[name].nbytes
            header[name] = {"dtype": kind, "shape": list(arrays[name].shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with atomic_files.replacing(path, shared=True) as partial, partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, kind in _TYPES.items():
                file.write(np.ascontiguousarray(arrays[name], _DTYPES[kind]).data)

    @classmethod
    def load(cls, path: Path, vocabulary: int, *, mapped: bool = True) -> NgramStore:
        """Read a store, whose pages stay on disk until they are looked at. Raises BadRequest, or OSError.

        vocabulary: number of the target's token ids. mapped: False for a file that somebody may overwrite in place,
        which is then read into memory.
        """
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if not 8 < size <= MAX_BYTES:
                raise _refused(path, f"it has {size} bytes, must be 9 to {MAX_BYTES}")
            file.seek(0)
            data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if mapped else file.read(size)
        try:
            header, begin = _header(data)
            facts = _facts(header)
            table = NgramTable.of({name: _array(data, begin, header, name) for name in _TYPES})
            if len(table.tokens) and int(table.tokens.max()) >= vocabulary:
                raise ValueError(f"it has token ids of {vocabulary} and more, which its target has not")
            if len(table.totals) and int(table.totals.max()) > 2**48:
                raise ValueError("it has counts that no traffic reaches")
        except (ValueError, LookupError, TypeError, RecursionError, BadRequest) as error:
            raise _refused(path, str(error)) from error
        return cls(table, **facts)

    def check(self, *, weights_hash: str, tokenizer_hash: str | None = None, tenant: str | None = None) -> None:
        """Raise ModelRefused unless the store is of this target, and of the tokenizer and the tenant that are given."""
        for name, own, wanted in (
            ("target", self.weights_hash, weights_hash),
            ("tokenizer", self.tokenizer_hash, tokenizer_hash),
            ("tenant", self.tenant, tenant),
        ):
            if wanted is not None and own != wanted:
                raise ModelRefused(f"the n-gram store is of the {name} {own[:80]!r}, here is {wanted[:80]!r}")


def _header(data: bytes | mmap.mmap) -> tuple[_Header, int]:
    """Return the header, and where the arrays begin. Raises ValueError."""
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= min(_MAX_HEADER, len(data) - 8):
        raise ValueError(f"its header has {length} bytes, must be 2 to {_MAX_HEADER} and within the file")
    header = json.loads(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return header, 8 + length


def _facts(header: _Header) -> Mapping[str, Any]:
    """Return the fields of a store but for its table. Raises ValueError, LookupError and TypeError."""
    known = header["__metadata__"]
    if known["format"] != _FORMAT:
        raise ValueError(f"its format is {str(known['format'])[:40]!r}, must be {_FORMAT!r}")
    texts = {name: str(known[name]) for name in ("weights_hash", "tokenizer_hash", "tenant")}
    if not all(0 < len(text) <= 256 and text.isprintable() for text in texts.values()):
        raise ValueError("target, tokenizer and tenant must have 1 to 256 printable characters")
    counts = {name: int(known[name]) for name in ("least_sessions", "sessions")}
    if counts["least_sessions"] < LEAST_SESSIONS or counts["sessions"] < 0:
        raise ValueError(f"its n-grams are of {counts['least_sessions']} sessions, must be at least {LEAST_SESSIONS}")
    return texts | counts


def _array(data: bytes | mmap.mmap, begin: int, header: _Header, name: str) -> NDArray[Any]:
    """Return an array without copying it. begin: of all arrays. Raises ValueError, LookupError and TypeError."""
    entry = header[name]
    dtype, [count], [first, end] = _DTYPES[_TYPES[name]], entry["shape"], entry["data_offsets"]
    whole = all(type(number) is int for number in (count, first, end))
    if not whole or entry["dtype"] != _TYPES[name] or not 0 <= first <= end <= len(data) - begin:
        raise ValueError(f"its array {name!r} is no {_TYPES[name]} within the file")
    if end - first != count * dtype.itemsize or (begin + first) % dtype.itemsize:
        raise ValueError(f"its array {name!r} of {count} items has {end - first} bytes from byte {begin + first} on")
    array: NDArray[Any] = np.frombuffer(data, dtype, count, begin + first)
    return array


def _refused(path: Path, reason: str) -> BadRequest:
    return BadRequest(f"{path.name} is no n-gram store: {reason[:300]}; build it again", field="store")
