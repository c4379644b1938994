"""Give devices and verifiers files that harm whoever opens them: drafts that abort llama.cpp, and template bombs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc

from benchmarks.attack import wire
from benchmarks.attack.finding import Finding, rounded
from benchmarks.attack.lab import Lab
from benchmarks.support.harness import Size
from outrider.wire.channels import channel
from outrider.wire.ticket import Signer
from outrider.wire.v1 import session_pb2 as pb

CHUNK_BYTES = 1 << 18
REFUSED_S = 90.0
"""Time in which `outrider up` ends, or says that it is ready."""
RENDERED_S = 12.0
"""Time in which a template has been rendered or refused; the product's own limit is 5 s."""
RENDERED_MB = 1_536.0
"""Memory that rendering takes, with the program that asks for it."""
BOMBS = {
    "nested_loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "list_doubling": "{% set n = namespace(l=['x']) %}{% for i in range(40) %}{% set n.l = n.l + n.l %}{% endfor %}",
    "replace": "{{ ('a' * 50000).replace('a', 'a' * 50000) | length }}",
    "center": "{{ 'x'.center(2000000000) }}",
    "ljust": "{{ 'x'.ljust(2000000000) }}",
}


async def hostile_drafts(lab: Lab) -> Finding:
    """Offer devices drafts that abort llama.cpp, as a verifier that does not check what it offers."""
    drafts = _drafts(lab.pair.draft.read_bytes())
    if lab.size is Size.SMOKE:
        drafts = {"block_count": drafts["block_count"]}
    endings: dict[str, str] = {}
    lone, key = await lab.lone_verifier(), Signer.generate().public_key.hex()
    async with lab.under_attack():
        for name, draft in drafts.items():
            endings[name] = await _load(lab, lone.address, draft)
        endings["block_count, with release keys"] = await _load(
            lab, lone.address, drafts["block_count"], OUTRIDER_EDGE_RELEASE_KEYS=key
        )
    held = all(ending == "went on" for ending in endings.values())
    return Finding(held, {"device": endings}, "the device's process goes on and generates")


async def bad_draft_of_up(lab: Lab) -> Finding:
    """Start `outrider up` with drafts of random bytes, of random weights, and one that aborts llama.cpp."""
    folder, good = lab.folder("bad"), lab.pair.draft.read_bytes()
    half = len(good) // 2
    drafts = {
        "bytes": os.urandom(100_000),
        "weights": good[:half] + os.urandom(len(good) - half),
        "block_count": _drafts(good)["block_count"],
    }
    endings: dict[str, dict[str, Any]] = {}
    async with lab.under_attack():
        for name, content in drafts.items():
            draft = folder / f"{name}.gguf"
            draft.write_bytes(content)
            words = ("up", "--listen", "127.0.0.1:0", "--state-dir", str(folder / name))
            # After `--` it goes to the verifier, which has to look at it by itself.
            models = ("--model", str(lab.pair.target), *(() if name == "bytes" else ("--",)), "--draft", str(draft))
            command = lab.product.python("-m", "coordinator.cli", *words, *models, HOME=str(folder))
            pinned = ["taskset", "--cpu-list", str(lab.cores[1]), *command]
            ended = await lab.product.run(pinned, REFUSED_S, until=b"ready: ")
            named = any("--draft" in line and str(draft) in line for line in ended.output.splitlines())
            endings[name] = {
                "exit": ended.code,
                "ready": "ready: " in ended.output,
                "draft_named": named,
                "seconds": rounded(ended.seconds),
            }
    held = all(ended["exit"] not in (None, 0) and ended["draft_named"] for ended in endings.values())
    return Finding(held, endings, "it ends with an error that names the draft, and does not say that it is ready")


async def template_bombs(lab: Lab) -> Finding:
    """Render chat templates that take all time or all memory."""
    measured = {}
    async with lab.under_attack():
        for name, template in list(BOMBS.items())[: lab.size.pick(smoke=1, quick=None, full=None)]:
            ended = await lab.product.run_device("render", lab.cores[1], 3 * RENDERED_S, template=template)
            said = _lines(ended.output)[-1:] or [{}]
            measured[name] = {
                "refused": said[0].get("error", "").startswith("ModelRefused"),
                "seconds": rounded(said[0].get("seconds")),
                "peak_mb": rounded(ended.peak_mb),
                "exit": ended.code,
            }
    held = all(
        bomb["refused"] and bomb["seconds"] <= RENDERED_S and bomb["peak_mb"] <= RENDERED_MB
        for bomb in measured.values()
    )
    bound = f"each is refused within {RENDERED_S:.0f} s and {RENDERED_MB:.0f} MB"
    return Finding(held, measured, bound)


def _drafts(good: bytes) -> dict[str, bytes]:
    """Return drafts that differ from a good one in one value of their head, and one that is none."""
    return {
        "block_count": _changed(good, "qwen3.block_count", struct.pack("<I", 0)),
        "epsilon": _changed(good, "qwen3.attention.layer_norm_rms_epsilon", struct.pack("<f", float("nan"))),
        "rope": _changed(good, "qwen3.rope.dimension_count", struct.pack("<I", 31)),
        "random": b"GGUF\x03\0\0\0" + os.urandom(100_000),
    }


def _changed(good: bytes, key: str, value: bytes) -> bytes:
    """Return a GGUF with another value of 4 bytes. Before a key stands its length, and after it the value's kind."""
    named = struct.pack("<Q", len(key)) + key.encode()
    at = good.index(named) + len(named) + 4
    return good[:at] + value + good[at + 4 :]


async def _load(lab: Lab, behind: str, draft: bytes, **variables: str) -> str:
    """Have a device load a draft from a hostile verifier, and generate; return how its process ended."""
    async with _hostile_verifier(behind, draft) as address:
        client = {"verifier": address, "cache_dir": str(lab.folder("cache"))}
        ended = await lab.product.run_device("load", lab.cores[1], 60.0, variables=variables, client=client)
    if ended.code is None:
        return "did not end"
    if ended.code:
        return f"ended with exit code {ended.code}"
    lines = _lines(ended.output)
    return "went on" if any(line.get("tokens") for line in lines) else f"got {lines[-1:]}"


def _lines(output: str) -> list[dict[str, Any]]:
    """Return what a device has said."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@contextlib.asynccontextmanager
async def _hostile_verifier(behind: str, draft: bytes) -> AsyncIterator[str]:
    """Serve as the verifier `behind` does, but for the draft."""
    async with channel(behind) as link:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_OtherDraft(link, draft),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


class _OtherDraft(grpc.GenericRpcHandler):
    """Pass calls on, and put another draft in the place of the one that is offered."""

    def __init__(self, link: grpc.aio.Channel, draft: bytes) -> None:
        self._link: Any = link  # its messages stay bytes
        self._draft = draft
        self._hash = f"sha256:{hashlib.sha256(draft).hexdigest()}"

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]
        if name == "Session":
            return grpc.stream_stream_rpc_method_handler(self._session)
        if name == "Describe":
            return grpc.unary_unary_rpc_method_handler(self._describe)
        return grpc.unary_stream_rpc_method_handler(self._fetch) if name == "FetchArtifact" else None

    async def _session(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in self._link.stream_stream(wire.SESSION)(requests, metadata=context.invocation_metadata()):
            yield message

    async def _describe(self, request: bytes, context: Any) -> bytes:
        method = "/outrider.wire.v1.Verifier/Describe"
        described = pb.DescribeResponse.FromString(await self._link.unary_unary(method)(request))
        for artifact in described.artifacts:
            if artifact.role == "draft":
                artifact.hash, artifact.size = self._hash, len(self._draft)
        return described.SerializeToString()

    async def _fetch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        asked = pb.FetchArtifactRequest.FromString(request)
        if asked.hash == self._hash:
            for at in range(asked.offset, len(self._draft), CHUNK_BYTES):
                yield pb.ArtifactChunk(data=self._draft[at : at + CHUNK_BYTES]).SerializeToString()
            return
        async for chunk in self._link.unary_stream("/outrider.wire.v1.Verifier/FetchArtifact")(request):
            yield chunk
