"""Documents to learn from: Python's standard library and GSM8K's training questions, nothing else.

A document is one JSON line ``{"kind", "split", "text"}``. Its split follows from its *source* (a file, a
question), so that no form of a held-out source is ever trained on.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from models.recipe.settings import ASSISTANT, END, SYSTEM, USER, Job

HELD_OUT_SHARE = 0.03
# Generated tables, fixtures of deliberately broken code, and demo programs teach little Python.
_SKIPPED_DIRS = {
    "site-packages", "dist-packages", "__pycache__", "encodings", "idlelib", "turtledemo", "lib2to3",
    "pydoc_data", "data", "bad_coding", "cjkencodings", "tokenizedata", "lib-dynload", "crashers",
}  # fmt: skip
_SKIPPED_FILES = ("_sysconfigdata", "antigravity", "this.py", "badsyntax", "bad_coding")
_TEST_DIRS = {"test", "tests"}
_MAX_FILE_BYTES = 400_000
_MAX_TEST_BYTES = 60_000
_MAX_LINE = 400

_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a programmer who writes clear Python.",
    "You solve problems step by step.",
)
_REQUESTS = (
    "Write a Python function `{name}`. {doc}",
    "Write a function {name} in Python: {doc}",
    "Please implement `{name}`. It should do this: {doc}",
)
_CLASS_REQUESTS = ("Write a Python class `{name}`. {doc}", "Please implement a class {name}: {doc}")
_CALCULATOR = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class Document:
    """One text to learn from, of one kind, on one side of the split."""

    kind: str
    split: str
    text: str


def build(job: Job) -> None:
    """Write ``corpus/documents.jsonl``; the same inputs give the same bytes."""
    folder = job.stage("corpus")
    documents = [*stdlib_documents(Path(sysconfig.get_path("stdlib"))), *math_documents(job.data)]
    # A shuffle that depends on content only: neighbours in the token stream are then unrelated.
    documents.sort(key=lambda item: _hash(item.kind + item.text))
    lines = (json.dumps(asdict(item)) + "\n" for item in documents)
    (folder / "documents.jsonl").write_text("".join(lines), encoding="utf-8")
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for item in documents:
        sizes[f"{item.kind}/{item.split}"] += len(item.text.encode())
        counts[f"{item.kind}/{item.split}"] += 1
    record = {"documents": counts, "bytes": sizes}
    (folder / "done.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def load(job: Job) -> list[Document]:
    """Read the documents that ``build`` wrote."""
    with (job.stage("corpus") / "documents.jsonl").open(encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def split_of(source: str) -> str:
    """Return ``"heldout"`` for a fixed pseudo-random share of the sources, else ``"train"``."""
    return "heldout" if _hash(source) / 2**64 < HELD_OUT_SHARE else "train"


def stdlib_documents(root: Path) -> Iterator[Document]:
    """Yield every usable file under ``root``, and a chat about each documented function in it."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        text = _readable(path, relative)
        if text is None:
            continue
        split = split_of(relative.as_posix())
        is_test = not _TEST_DIRS.isdisjoint(relative.parts)
        yield Document("tests" if is_test else "code", split, text + END)
        if not is_test:
            for chat in _code_chats(text):
                yield Document("chat_code", split, chat)


def math_documents(data: Path) -> Iterator[Document]:
    """Yield each training question as a worked text and as a chat."""
    with (data / "gsm8k_train.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            question = row["question"].strip()
            split = split_of(question)
            answer = worked_answer(row["answer"])
            yield Document("math", split, f"Question: {question}\nAnswer: {answer}{END}")
            yield Document("chat_math", split, chat_text(question, answer))


def worked_answer(raw: str) -> str:
    """Drop the calculator annotations and turn the final ``#### n`` into a sentence."""
    steps, _, result = _CALCULATOR.sub("", raw).partition("####")
    return f"{steps.strip()}\nThe answer is {result.strip()}."


def chat_text(question: str, answer: str) -> str:
    """Render one exchange as the tokenizer's chat template does; one in five has a system message."""
    pick = _hash(question)
    system = f"{SYSTEM}{_SYSTEM_MESSAGES[pick // 5 % 3]}{END}" if pick % 5 == 0 else ""
    return f"{system}{USER}{question}{END}{ASSISTANT}{answer}{END}"


def _readable(path: Path, relative: Path) -> str | None:
    if not _SKIPPED_DIRS.isdisjoint(relative.parts) or relative.name.startswith(_SKIPPED_FILES):
        return None
    limit = _MAX_FILE_BYTES if _TEST_DIRS.isdisjoint(relative.parts) else _MAX_TEST_BYTES
    if not 200 < path.stat().st_size <= limit:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    lines = text.splitlines()
    mostly_ascii = len(text.encode()) < 1.02 * len(text)
    return text if mostly_ascii and max(map(len, lines)) <= _MAX_LINE and "\0" not in text else None


def _code_chats(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            chat = _chat_about(node, text)
            if chat is not None:
                yield chat


def _chat_about(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, text: str) -> str | None:
    doc = ast.get_docstring(node)
    source = ast.get_source_segment(text, node, padded=True)
    if not doc or not source or not 80 < len(source) < 1800 or len(doc) < 15:
        return None
    code = textwrap.dedent(source).strip("\n")
    summary = " ".join(doc.split("\n\n")[0].split())
    pick = _hash(code)
    if pick % 8 == 0:
        question = f"What does this Python code do?\n\n```python\n{code}\n```"
        return chat_text(question, " ".join(doc.split()))
    forms = _CLASS_REQUESTS if isinstance(node, ast.ClassDef) else _REQUESTS
    question = forms[pick // 8 % len(forms)].format(name=node.name, doc=summary)
    return chat_text(question, f"```python\n{code}\n```")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
