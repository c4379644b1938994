"""What devices fetch by content hash before they can draft: tokenizer, chat template, draft."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import BadRequest, ModelRefused, NotFound
from outrider.wire.v1 import session_pb2 as pb

CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Artifact:
    role: str
    name: str
    hash: str
    """sha256:<hex> of the bytes"""
    size: int
    """bytes"""
    source: Path | bytes

    def to_proto(self) -> pb.Artifact:
        return pb.Artifact(role=self.role, name=self.name, hash=self.hash, size=self.size)


class Catalogue:
    """The artifacts of one target, hashed once at start."""

    def __init__(self, artifacts: list[Artifact]) -> None:
        self._by_hash = {artifact.hash: artifact for artifact in artifacts}

    @classmethod
    def of_target(cls, model: Path, draft: Path | None) -> Catalogue:
        """Raises ModelRefused where the tokenizer or the draft is missing."""
        artifacts = [_file("tokenizer", model / "tokenizer.json")]
        if template := chat_template(model):
            artifacts.append(_artifact("template", "chat_template.jinja", template.encode()))
        if draft is not None:
            artifacts.append(_file("draft", draft))
        return cls(artifacts)

    def __iter__(self) -> Iterator[Artifact]:
        return iter(self._by_hash.values())

    def read(self, content_hash: str, offset: int) -> Iterator[bytes]:
        """The bytes from `offset` on, in chunks. Raises NotFound or BadRequest."""
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
    """The target's chat template: chat_template.jinja, or tokenizer_config.json's; "" where there is none."""
    if (path := model / "chat_template.jinja").is_file():
        return path.read_text()
    if (path := model / "tokenizer_config.json").is_file():
        template = json.loads(path.read_text()).get("chat_template")
        return template if isinstance(template, str) else ""
    return ""


def _artifact(role: str, name: str, data: bytes) -> Artifact:
    return Artifact(role, name, f"sha256:{hashlib.sha256(data).hexdigest()}", len(data), data)


def _file(role: str, path: Path) -> Artifact:
    if not path.is_file():
        raise ModelRefused(f"{role} {path} is not a file; devices need it to draft")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Artifact(role, path.name, f"sha256:{digest}", path.stat().st_size, path)
