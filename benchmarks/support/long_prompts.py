"""Make prompts behind a long context: code of Python's standard library that no model of the pair was trained on."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.support.old_harness import Pair, Prompt
from models.recipe.corpus import split_of
from models.recipe.settings import END
from outrider.core.errors import BadRequest


def heldout_code() -> str:
    """Return the files of Python's standard library that the pair's recipe keeps from training, one after another."""
    root = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(root) for path in sorted(root.rglob("*.py")))
    kept = (name for name in names if not {"site-packages", "dist-packages", "test", "tests"}.intersection(name.parts))
    return END.join(
        (root / name).read_text(errors="replace") for name in kept if split_of(name.as_posix()) == "heldout"
    )


class LongPrompts:
    """Make prompts of a chosen length."""

    def __init__(self, pair: Pair) -> None:
        self._tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
        self._pair = pair
        self.code = self._ids(heldout_code())

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def after(self, tokens: int, title: str, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt after one context of so many tokens; 0 leaves the prompts as they are.

        title: of its first line. Contexts with other titles, or longer ones, begin alike for a few tokens only, so no
        cache holds them.
        """
        context = [*self._ids(f"# {title}, {tokens} tokens\n"), *self.code][:tokens]
        if len(context) < tokens:
            raise BadRequest.bound("context", f"{tokens} tokens", f"at most {len(context)}, all held-out code")
        ids = self._pair.encode(prompts)
        if not context:
            return [ids[one.id] for one in prompts]
        goes_on, begins = self._ids("\n\n\n"), self._ids(END)
        return [[*context, *(goes_on if one.kind == "code" else begins), *ids[one.id]] for one in prompts]
