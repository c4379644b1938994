"""Offer what devices fetch by content hash before they can draft: tokenizer, chat template, special tokens, draft."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.artifacts.hashing import content_hash
from outrider.core.errors import BadRequest, ModelRefused, NotFound
from outrider.wire.v1 import session_pb2 as pb

CHUNK_BYTES = 1 << 18
DEFAULT_TEMPLATE = "default"
"""The name of the chat template to take if there are several, as transformers does."""


@dataclass(frozen=True)
class Artifact:
    """One file or text, by the hash of its bytes."""

    role: str
    """tokenizer, template, special_tokens or draft."""
    name: str
    hash: str
    """sha256:<hex> of the bytes."""
    size: int
    """Size in bytes."""
    source: Path | bytes

    def to_proto(self) -> pb.Artifact:
        return pb.Artifact(role=self.role, name=self.name, hash=self.hash, size=self.size)


class Catalogue:
    """The artifacts of one target, hashed once at start."""

    def __init__(self, artifacts: list[Artifact]) -> None:
        self._by_hash = {artifact.hash: artifact for artifact in artifacts}

    @classmethod
    def of_target(cls, model: Path, draft: Path | None) -> Catalogue:
        """Collect the artifacts of a model directory and a draft. Raises ModelRefused if the tokenizer or the draft is
        missing, or a file that should be JSON is not."""
        artifacts = [_file("tokenizer", model / "tokenizer.json")]
        if template := chat_template(model):
            artifacts.append(_text("template", "chat_template.jinja", template))
        if tokens := special_tokens(model):
            text = json.dumps(tokens, ensure_ascii=False, sort_keys=True)
            artifacts.append(_text("special_tokens", "special_tokens.json", text))
        if draft is not None:
            artifacts.append(_file("draft", draft))
        return cls(artifacts)

    def __iter__(self) -> Iterator[Artifact]:
        return iter(self._by_hash.values())

    def read(self, content_hash: str, offset: int) -> Iterator[bytes]:
        """Yield an artifact's bytes from `offset` on, in chunks. Raises NotFound or BadRequest."""
        artifact = self._by_hash.get(content_hash)
        if artifact is None:
            raise NotFound(f"no artifact {content_hash[:80]!r} here; Describe lists those that are")
        if offset > artifact.size:
            raise BadRequest.bound("offset", offset, f"at most {artifact.size}, the size of {artifact.name}")
        if isinstance(artifact.source, bytes):
            yield artifact.source[offset:]
            return
        with artifact.source.open("rb") as file:
            file.seek(offset)
            while chunk := file.read(CHUNK_BYTES):
                yield chunk


def chat_template(model: Path) -> str:
    """Return the target's chat template, from chat_template.jinja or tokenizer_config.json; "" if there is none."""
    if (path := model / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    template = _json(model / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get(DEFAULT_TEMPLATE)
    return template if isinstance(template, str) else ""


def special_tokens(model: Path) -> dict[str, str]:
    """Return the texts of special tokens by name (bos_token, eos_token, ...), as chat templates use them. Those of
    tokenizer_config.json take precedence."""
    tokens: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        texts = {name: _token_text(value) for name, value in _json(model / file).items() if name.endswith("_token")}
        tokens |= {name: text for name, text in texts.items() if text is not None}
    return tokens


def _token_text(value: object) -> str | None:
    """Return the text of a token that is written as its text or as an AddedToken's fields; None for anything else."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


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


def _file(role: str, path: Path) -> Artifact:
    if not path.is_file():
        raise ModelRefused(f"{role} {path} is not a file; devices need it to draft")
    return Artifact(role, path.name, content_hash(path), path.stat().st_size, path)


def _text(role: str, name: str, text: str) -> Artifact:
    data = text.encode()
    return Artifact(role, name, content_hash(data), len(data), data)
