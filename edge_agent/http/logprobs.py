"""Log-probabilities in OpenAI's two shapes: a chat's, and the older one of completions."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Any

from outrider.core.protocol.messages import TokenLogprobs

Table = Sequence[bytes]
"""Raw bytes of every token id."""


class Teller:
    """Of one choice, in the order of its tokens. silent: ids that are no text. offset: characters of text before its
    first one."""

    def __init__(self, table: Table, silent: Collection[int] = (), *, chat: bool, offset: int = 0) -> None:
        self._table = table
        self._silent = silent
        self._chat = chat
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def tell(self, ids: Sequence[int], known: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        """None where nothing was asked."""
        if known is None:
            return None
        if self._chat:
            told = [
                {**self._token(token, one.logprob), "top_logprobs": [self._token(*other) for other in one.top]}
                for token, one in zip(ids, known, strict=True)
            ]
            return {"content": told, "refusal": None}
        return {
            "tokens": [self._text(token) for token in ids],
            "token_logprobs": [one.logprob for one in known],
            "top_logprobs": [{self._text(token): value for token, value in one.top} for one in known],
            "text_offset": [self._passed(token) for token in ids],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": logprob, "bytes": list(self._bytes(token))}

    def _bytes(self, token: int) -> bytes:
        return self._table[token] if token < len(self._table) else b""

    def _text(self, token: int) -> str:
        """As OpenAI writes what is a part of a character."""
        raw = self._bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _passed(self, token: int) -> int:
        """Where the token's text begins."""
        if token in self._silent:
            return self._offset
        cut, _ = self._decoder.getstate()
        text = self._decoder.decode(self._bytes(token))
        replaced = bool(cut) and text.startswith("\ufffd")  # a character before that this token does not finish
        begins = self._offset + replaced
        self._offset += len(text)
        return begins
