"""Constrain a session's output: say which tokens may follow, at the end of the sequence and below nodes of the tree.

A grammar is Lark text as llguidance reads it, in which `%json` embeds a JSON Schema (docs/protocol.md, "Grammar").
Device and verifier use the same version of it, so that a device's proposals are tokens that the target may take. Limits
count work rather than time, so that what is within them on one machine is so on every other; time alone ends a compiler
that they do not.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import BadRequest, ModelRefused
from outrider.core.grammar_checks import check_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
Row = NDArray[np.floating[Any]]

CACHED = 256
"""Grammars that are kept compiled, those that were used last."""
MAX_FORCED = 1_024
"""Most tokens that a grammar may leave no choice for at once: each of them costs time at every place before it."""
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 500_000,
}
"""A mask then takes some 20 ms at most, where that of a schema takes a hundredth: neighbours wait for it. The lexer's
fuel also bounds what a regular expression grows to while it is followed, in time and in memory."""
COMPILE_S = 10.0
"""Seconds that compiling may take, hundreds of times a usual grammar's; a thread that takes longer is left behind."""
STACK_BYTES = 1 << 28
"""Stack of a thread that compiles. The longest chain of references in a grammar of 128 KiB has needed 32 MiB."""
_STACK_LOCK = threading.Lock()
_SHOWN = 500
"""Characters of a library's message that a refusal repeats."""


class Constraint:
    """Says which tokens the target may take at a position of one sequence, by its grammar and its least length.

    Neither changes how a token is chosen among those. Where the grammar allows an end alone, it may come too early.
    """

    def __init__(self, grammar: GrammarState | None, ends: Collection[int], min_tokens: int = 0) -> None:
        """Follow `grammar` from where it stands. ends: ids that may not come before position `min_tokens`."""
        self._grammar = grammar
        self._ends = np.fromiter(ends, np.int64)
        self._min_tokens = min_tokens

    def binds(self, position: int) -> bool:
        """Return whether it may forbid a token at this position."""
        return self._grammar is not None or position < self._min_tokens

    def early_ends(self, position: int) -> NDArray[np.int64]:
        """Return the ids that end the sequence and may not do so yet at this position, whatever the grammar says."""
        return self._ends[: len(self._ends) if position < self._min_tokens else 0]

    def allows(self, token: int, position: int, path: Sequence[int]) -> bool:
        """Return whether a token is among the allowed ones, at less cost. False for an end that comes too early, also
        if nothing else is left. path, errors: as of `allowed`."""
        if position < self._min_tokens and token in self._ends:
            return False
        return self._grammar is None or self._grammar.allows(token, path)

    def allowed(self, width: int, position: int, path: Sequence[int]) -> NDArray[np.bool_]:
        """Return whether each of the first `width` ids may follow; none does beyond the grammar's vocabulary.

        path: the tokens between the last committed one and this position. Raises BadRequest if the grammar exceeds its
        limits.
        """
        allowed = np.ones(width, np.bool_)
        if self._grammar is not None:
            mask = self._grammar.mask(path)[:width]
            allowed[: len(mask)], allowed[len(mask) :] = mask, False
        if position < self._min_tokens:
            ends = self._ends[self._ends < width]
            if self._grammar is None or np.delete(allowed, ends).any():
                allowed[ends] = False
        return allowed

    def masked(self, logits: Row, position: int, path: Sequence[int]) -> Row:
        """Return logits `[V]` with -inf for tokens that may not follow. path, errors: as of `allowed`."""
        return np.where(self.allowed(len(logits), position, path), logits, -np.inf)

    def forced(self, path: Sequence[int]) -> list[int]:
        """Return the tokens that must follow the path by the grammar; none where there is a choice. Raises as `allows`
        does."""
        return [] if self._grammar is None else self._grammar.forced(path)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence. Never raises: what the grammar says against them, `check` does."""
        if self._grammar is not None:
            self._grammar.commit(tokens)

    def check(self) -> None:
        """Raise BadRequest if the grammar forbids the sequence, or exceeds its limits."""
        if self._grammar is not None:
            self._grammar.check()


def constraint_of(
    grammar: GrammarState | None, ends: Collection[int], min_tokens: int, output: Sequence[int]
) -> Constraint | None:
    """Return what constrains a sequence that stands at the end of `output`; None if nothing does.

    ends: all ids that end the sequence. grammar: its state before the first token. Raises BadRequest if it forbids the
    output.
    """
    if grammar is None and not min_tokens:
        return None
    constraint = Constraint(grammar, ends, min_tokens)
    constraint.commit(output)
    constraint.check()
    return constraint


class GrammarState:
    """Follows one sequence through its grammar. Not thread-safe.

    A path is the tokens between the last committed one and the place that is asked about. Places may be asked about in
    any order; that of a path that continues the last one costs least.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, failed: Callable[[], None] = lambda: None) -> None:
        """Begin with the matcher's own state, of which this has its copy.

        failed: is called when the grammar turns out not to be followed. Copies of a matcher share what their lexer has
        found, and its limits: after an error of one, others may be of no use either.
        """
        self._matcher = matcher
        self._failed = failed
        self._vocabulary = tokenizer.vocab_size
        self._eos = frozenset(tokenizer.eos_tokens)
        self._path: list[int] = []
        self._bits = np.zeros((self._vocabulary + 31) // 32, dtype="<u4")

    def allows(self, token: int, path: Sequence[int]) -> bool:
        """Return whether the token may follow the path, as `mask` says at a greater cost. Raises as it does."""
        forced = self.forced(path)
        if forced:
            allowed = token == forced[0]  # of ways to write a text that must come, the tokenizer's own is left
        elif token in self._eos:
            allowed = self._matcher.is_accepting()
        else:
            allowed = self._matcher.validate_tokens([token]) == 1
        self.check()
        return allowed

    def mask(self, path: Sequence[int]) -> NDArray[np.bool_]:
        """Return for every token whether it may follow the path, `[V]`. Raises BadRequest if the grammar exceeds its
        limits there."""
        self._go(path)
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self.check()
        bits = np.unpackbits(self._bits.view(np.uint8), count=self._vocabulary, bitorder="little")
        return bits.view(np.bool_)

    def forced(self, path: Sequence[int]) -> list[int]:
        """Return the tokens that must follow the path one after the other; none where there is a choice.

        Raises BadRequest if they are more than MAX_FORCED, or if the grammar exceeds its limits.
        """
        self._go(path)
        if self._matcher.is_stopped():
            tokens = [*self._eos] if len(self._eos) == 1 else []
        else:
            tokens = self._matcher.compute_ff_tokens()
        self.check()
        if len(tokens) > MAX_FORCED:
            self._failed()
            problem = f"the grammar leaves no choice for {len(tokens)} tokens at once, must be at most {MAX_FORCED}"
            raise BadRequest(problem, field="grammar")
        return tokens

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence. Never raises; if the grammar does not allow them, `check` does."""
        self._go(tokens)
        self._path.clear()

    def check(self) -> None:
        """Raise BadRequest if the grammar forbids the sequence, or exceeds its limits."""
        if self._matcher.is_error():
            self._failed()
            raise BadRequest(f"the grammar cannot be followed: {_problem(self._matcher.get_error())}", field="grammar")

    def _go(self, path: Sequence[int]) -> None:
        """Bring the matcher to a path."""
        shared = 0
        for own, token in zip(self._path, path, strict=False):
            if own != token:
                break
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
            del self._path[shared:]
        for token in path[shared:]:
            self._matcher.consume_token(token)
            self._path.append(token)


class Grammars:
    """Compiles grammars for one tokenizer and keeps the last ones. Thread-safe."""

    def __init__(self, tokenizer_json: str, vocabulary: int, eos_token_ids: Sequence[int]) -> None:
        """Read the tokenizer. vocabulary: V, the number of logits. Raises ModelRefused for one that it cannot use."""
        # Not before it is needed: commands that only tell their options need not wait for it.
        from llguidance import LLTokenizer

        if not eos_token_ids:
            raise ModelRefused("the target has no token that ends a sequence, which a grammar needs")
        try:
            self.tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=list(eos_token_ids))
        except Exception as error:
            raise ModelRefused(f"the tokenizer cannot be used with grammars: {_first_line(str(error))}") from error
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, grammar: str) -> GrammarState:
        """Return the state before the first token. Compile the grammar unless it is known; others do not wait.

        Raises BadRequest, which names the place, for a grammar that is wrong, too large or of unknown features.
        """
        matcher = self._matcher(grammar)
        return GrammarState(matcher.deep_copy(), self.tokenizer, lambda: self._forget(grammar, matcher))

    def knows(self, grammar: str) -> bool:
        """Return whether the grammar is compiled."""
        with self._lock:
            return grammar in self._compiled

    def compile(self, grammar: str) -> None:
        """Compile a grammar unless it is known. Raises as `begin` does."""
        self._matcher(grammar)

    def _matcher(self, grammar: str) -> LLMatcher:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
        matcher = self._compiled_anew(grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        return matcher

    def _forget(self, grammar: str, matcher: LLMatcher) -> None:
        """Compile the grammar anew for the next session, unless that has been done."""
        with self._lock:
            if self._compiled.get(grammar) is matcher:
                del self._compiled[grammar]

    def _compiled_anew(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        check_grammar(grammar)
        limits = LLParserLimits(**_LIMITS)
        matcher = _with_deep_stack(
            lambda: LLMatcher(self.tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)
        )
        if matcher.is_error():
            raise BadRequest(f"the grammar is refused: {_problem(matcher.get_error())}", field="grammar")
        beginning = GrammarState(matcher.deep_copy(), self.tokenizer)
        beginning.mask([])  # first, since it lets other threads run, and does most of the other's work
        beginning.forced([])
        return matcher


@functools.lru_cache(maxsize=1)
def grammars_of(tokenizer: Path, vocabulary: int, eos_token_ids: tuple[int, ...]) -> Grammars:
    """Return the process's grammars of a target by its tokenizer.json. Raises ModelRefused."""
    try:
        text = tokenizer.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelRefused(f"{tokenizer} cannot be read: {error}") from error
    return Grammars(text, vocabulary, eos_token_ids)


def grammar_warnings(grammar: str) -> list[str]:
    """Return what a compiler ignores in a grammar with lenient schemas. Raises BadRequest for one that it refuses."""
    from llguidance import LLMatcher, LLParserLimits

    check_grammar(grammar)
    limits = LLParserLimits(**_LIMITS)
    refused, messages = _with_deep_stack(
        lambda: LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar), limits=limits)
    )
    if refused:
        raise BadRequest(f"the grammar is refused: {_problem(messages[0])}", field="grammar")
    return [_first_line(message) for message in messages]


def _with_deep_stack(build: Callable[[], T]) -> T:
    """Return what a function returns on a thread with a deep stack: a chain of references overflows a usual one.

    Raises BadRequest after COMPILE_S.
    """
    built = Future[T]()

    def run() -> None:
        try:
            built.set_result(build())
        except BaseException as error:  # PanicException is none of Exception
            built.set_exception(error)

    with _STACK_LOCK:
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="outrider-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    try:
        return built.result(COMPILE_S)
    except TimeoutError:
        raise BadRequest(
            f"the grammar is refused: compiling it takes longer than {COMPILE_S:g} s; make it simpler", field="grammar"
        ) from None


def _problem(message: str) -> str:
    """Return what a library's message says is wrong: the place, and the reason, lines below if it is a regex's."""
    if message.startswith("NoExtensionBias"):
        return "it has a place at which nothing may follow, and the text may not end"
    reason = re.search(r"^error: .*", message, re.MULTILINE)
    expression = message.strip().split("\n", 2)[1].strip()[:_SHOWN] if reason else ""
    return _first_line(message) + (f" {expression}: {_first_line(reason[0])}" if reason else "")


def _first_line(message: str) -> str:
    return message.strip().split("\n", 1)[0][:_SHOWN]
