"""Tokenise for the target on the device, with the `tokenizers` library alone."""

from __future__ import annotations

import functools
import threading

from outrider.core.constraint import Grammars
from outrider.core.errors import TOO_LONG, BadRequest, ModelRefused
from outrider.core.protocol.messages import MAX_PROMPT_TOKENS
from outrider.core.vocabulary import token_table, vocabulary_hash


class TargetTokenizer:
    """Turns text into ids. `edge_agent.target.detokenizer` turns ids into text by the same table."""

    def __init__(self, data: bytes, max_sequence: int = 0) -> None:
        """Read `data`, a tokenizer.json. Raises ModelRefused for an invalid one, ImportError naming the extra.

        max_sequence: most tokens that the target holds, 0 if unknown.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError("the device needs tokenizers: pip install 'outrider[edge]'") from error
        self._data = data
        self._grammars: Grammars | None = None
        self._making_grammars = threading.Lock()
        self.table = token_table(data)
        """The raw bytes of every id."""
        self._most_tokens = min(max_sequence or MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS)
        self._most_characters = self._most_tokens * max(map(len, self.table), default=0)
        """Of a text that the target could hold, however it is tokenised: a character is at least a byte."""
        try:
            self._tokenizer = Tokenizer.from_buffer(data)
            self._plain = Tokenizer.from_buffer(data)
        except BaseException as error:
            _reraise_foreign(error)
            raise ModelRefused(f"the target's tokenizer.json cannot be read: {error}") from error
        for tokenizer in (self._tokenizer, self._plain):  # the file may truncate and pad, as its training did
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._plain.encode_special_tokens = True  # a control token that a user spells out is text
        added = self._tokenizer.get_added_tokens_decoder()
        self.added = frozenset(added)
        """Ids of tokens beside the vocabulary's, some of which are special."""
        self.special = frozenset(i for i, token in added.items() if token.special)
        """Ids that stand for no text."""
        self.controls = tuple(token.content for token in added.values() if token.special)

    @functools.cached_property
    def vocabulary_hash(self) -> bytes:
        return vocabulary_hash(self.table)

    def grammars(self, vocabulary: int, eos_token_ids: tuple[int, ...]) -> Grammars:
        """Return the grammars of the target, which has so many logits; they are made once, on the caller's thread.

        Raises ModelRefused for a tokenizer that cannot be used with them.
        """
        with self._making_grammars:
            if self._grammars is None:
                self._grammars = Grammars(self._data.decode(), vocabulary, eos_token_ids)
            return self._grammars

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text in which control tokens are spelt out and meant, as a chat template's."""
        return self._ids(self._tokenizer, text, added=False)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a user's text, without a BOS token."""
        return self._ids(self._plain, text, added=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a user's text as a prompt, with the BOS token where the target has one."""
        return self._ids(self._plain, text, added=True)

    def _ids(self, tokenizer: object, text: str, *, added: bool) -> list[int]:
        if len(text) > (most := self._most_characters):
            bound = f"at most {most}, {self._most_tokens} of the target's longest tokens; shorten it"
            raise BadRequest(f"the text has {len(text)} characters, must be {bound}", field=TOO_LONG)
        try:
            # A batch of one, since that releases the interpreter's lock: a long text would stop every other thread.
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=added)  # type: ignore[attr-defined]
            return list(encoding.ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise BadRequest(f"the text cannot be tokenised: {error}; remove lone surrogates", field="text") from error
        except BaseException as error:
            _reraise_foreign(error)
            raise ModelRefused(f"the target's tokenizer fails on this text: {error}") from error


def _reraise_foreign(error: BaseException) -> None:
    """Raise `error` again unless it is the library's, which raises Exception and PanicException, a BaseException."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
