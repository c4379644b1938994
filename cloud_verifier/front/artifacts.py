"""Offer the files that devices fetch by content hash to draft: tokenizer, chat template, special tokens, draft."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.artifacts.model_files import parts
from outrider.artifacts.store import content_hash
from outrider.core.errors import BadRequest, ModelRefused, NotFound
from outrider.wire.v1 import session_pb2 as pb

CHUNK_BYTES = 1 << 18
DEFAULT_TEMPLATE, TOOLS_TEMPLATE = "default", "tool_use"
"""The names of the chat templates to take if there are several, without tools and with them, as transformers does."""


class Catalogue:
    """Lists and reads the artifacts of one target, which are hashed once at start."""

    def __init__(self) -> None:
        self._by_hash: dict[str, tuple[pb.Artifact, Path | bytes]] = {}
        """hash -> an artifact, and its file or bytes"""

    @classmethod
    def of_target(cls, model: Path, draft: Path | None) -> Catalogue:
        """Collect the artifacts of a model directory and a draft. Raises ModelRefused if the tokenizer or the draft is
        missing, or a file that should be JSON is not."""
        catalogue = cls()
        catalogue._add("tokenizer", "tokenizer.json", model / "tokenizer.json")
        if template := chat_template(model):
            catalogue._add("template", "chat_template.jinja", template.encode())
        if tokens := special_tokens(model):
            text = json.dumps(tokens, ensure_ascii=False, sort_keys=True)
            catalogue._add("special_tokens", "special_tokens.json", text.encode())
        if draft is not None:
            if len(parts(draft.name)) > 1:
                raise ModelRefused(
                    f"--draft {draft}: devices fetch a draft as one file, and this one is split; join its parts with"
                    " `llama-gguf-split --merge`"
                )
            catalogue._add("draft", draft.name, draft)
        return catalogue

    def __iter__(self) -> Iterator[pb.Artifact]:
        return (artifact for artifact, _ in self._by_hash.values())

    def read(self, wanted: str, offset: int) -> Iterator[bytes]:
        """Yield the bytes of the artifact with the hash `wanted`, from `offset` on. Raises NotFound or BadRequest."""
        if wanted not in self._by_hash:
            raise NotFound(f"no artifact {wanted[:80]!r} here; Describe lists those that are")
        artifact, source = self._by_hash[wanted]
        if offset > artifact.size:
            raise BadRequest.bound("offset", offset, f"at most {artifact.size}, the size of {artifact.name}")
        if isinstance(source, bytes):
            yield source[offset:]
            return
        with source.open("rb") as file:
            file.seek(offset)
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def _add(self, role: str, name: str, source: Path | bytes) -> None:
        if isinstance(source, Path) and not source.is_file():
            raise ModelRefused(f"{role} {source} is not a file; devices need it to draft")
        size = source.stat().st_size if isinstance(source, Path) else len(source)
        artifact = pb.Artifact(role=role, name=name, hash=content_hash(source), size=size)
        self._by_hash[artifact.hash] = artifact, source


def chat_template(model: Path) -> str:
    """Return the target's chat template, which of named ones takes that for tools where there are some; "" for none.

    It is in chat_template.jinja and additional_chat_templates, else in tokenizer_config.json or chat_template.json.
    """
    files = sorted((model / "additional_chat_templates").glob("*.jinja"))
    found: dict[Any, Any] = {path.stem: path.read_text(encoding="utf-8") for path in files}
    if (path := model / "chat_template.jinja").is_file():
        found[DEFAULT_TEMPLATE] = path.read_text(encoding="utf-8")
    for config in () if found else ("chat_template.json", "tokenizer_config.json"):
        template = _json(model / config).get("chat_template")
        if isinstance(template, list):
            template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if template:
            found = template if isinstance(template, dict) else {DEFAULT_TEMPLATE: template}
    named = {name: text for name, text in found.items() if isinstance(text, str)}
    with_tools = named.pop(TOOLS_TEMPLATE, "")
    without = named.get(DEFAULT_TEMPLATE) or next(iter(named.values()), with_tools)
    if not with_tools or with_tools == without:
        return without
    with_tools, without = (text.removesuffix("\n") for text in (with_tools, without))  # as Jinja does at the end
    return f"{{%+ if tools +%}}{with_tools}{{%+ else +%}}{without}{{%+ endif +%}}"


def special_tokens(model: Path) -> dict[str, str]:
    """Return the texts of special tokens by name (bos_token, eos_token, ...), as chat templates use them. Those of
    tokenizer_config.json take precedence."""
    tokens: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in _json(model / file).items():
            text = value.get("content") if isinstance(value, dict) else value  # an AddedToken's fields, or its text
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is no file. Raises ModelRefused."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelRefused(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelRefused(f"{path} holds a {type(value).__name__}, must be an object")
    return value
