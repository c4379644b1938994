"""Test the artifacts that devices fetch: the catalogue, and its bytes over a socket."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from scripted_engine import front, until

from cloud_verifier.front import service
from cloud_verifier.front.artifacts import CHUNK_BYTES, Catalogue, chat_template
from outrider.core.errors import BadRequest, ModelRefused, NotFound, Unavailable
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import session_pb2

DRAFT = bytes(i * 7 % 251 for i in range(2 * CHUNK_BYTES + 1000))


@pytest.fixture
def model(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "draft.gguf").write_bytes(DRAFT)
    return tmp_path


@pytest.fixture
def catalogue(model):
    return Catalogue.of_target(model, model / "draft.gguf")


def by_role(catalogue, role):
    return next(artifact for artifact in catalogue if artifact.role == role)


def content_of(catalogue, role):
    return b"".join(catalogue.read(by_role(catalogue, role).hash, 0))


@pytest.mark.parametrize("offset", [0, CHUNK_BYTES + 1, len(DRAFT)])
def test_any_rest_of_a_file_can_be_read(catalogue, offset):
    assert b"".join(catalogue.read(by_role(catalogue, "draft").hash, offset)) == DRAFT[offset:]


def test_a_template_in_the_tokenizers_configuration_is_found(model):
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    assert content_of(Catalogue.of_target(model, None), "template") == b"{{ x }}"


NAMED = {"tool_use": "{{ tools }}\n", "default": " {{ x }}\n \n", "rag": "{{ documents }}"}
IN_FILES = {f"additional_chat_templates/{name}.jinja": NAMED[name] for name in ("rag", "tool_use")}
LISTED = [{"name": name, "template": text} for name, text in NAMED.items()]


@pytest.mark.parametrize(
    ("files", "text", "with_tools"),
    [
        ({"chat_template.json": json.dumps({"chat_template": "{{ x }}"})}, "1", "1"),
        ({"tokenizer_config.json": json.dumps({"chat_template": LISTED})}, " 1\n ", "[2]"),
        ({"tokenizer_config.json": json.dumps({"chat_template": LISTED[:1]})}, "", "[2]"),
        ({"tokenizer_config.json": json.dumps({"chat_template": LISTED[2:]})}, "3", "3"),
        ({"chat_template.jinja": NAMED["default"], **IN_FILES}, " 1\n ", "[2]"),
        (IN_FILES, "3", "[2]"),
        ({"tokenizer_config.json": json.dumps({"chat_template": [{"name": 1}, 2]})}, None, None),
    ],
)
def test_named_templates_are_one_that_takes_the_one_for_tools_where_there_are_some(model, files, text, with_tools):
    (model / "chat_template.jinja").unlink()
    for name, content in files.items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(content)
    source = chat_template(model)
    if text is None:
        assert source == ""
        return
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert template.render(x=1, documents=3) == text
    assert template.render(x=1, documents=3, tools=[2]) == with_tools


def test_special_tokens_are_served_by_name_however_they_are_written(model):
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "unk_token": None,
        "pad_token": {"lstrip": False},
        "add_bos_token": True,
        "tokenizer_class": "X",
    }
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    catalogue = Catalogue.of_target(model, None)
    assert by_role(catalogue, "special_tokens").name == "special_tokens.json"
    assert json.loads(content_of(catalogue, "special_tokens")) == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("text", ["{", "[]", b"\xff"])
def test_a_configuration_that_cannot_be_read_is_refused(model, text):
    (model / "tokenizer_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelRefused, match=r"tokenizer_config\.json"):
        Catalogue.of_target(model, None)


async def test_refusals_reach_the_device(model, catalogue):
    async with front(model, catalogue=catalogue) as running:
        requests = [
            (session_pb2.FetchArtifactRequest(hash="sha256:no"), NotFound),
            (session_pb2.FetchArtifactRequest(hash=by_role(catalogue, "draft").hash, offset=2**60), BadRequest),
        ]
        for request, expected in requests:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in running.stub.FetchArtifact(request):
                    pass
            assert type(error_from_rpc(caught.value)) is expected


async def test_a_download_that_nobody_reads_keeps_out_another_one_until_it_gives_its_place_back(
    model, catalogue, monkeypatch
):
    monkeypatch.setattr(service, "MAX_DOWNLOADS", 2)
    monkeypatch.setattr(service, "CHUNK_TIMEOUT_S", 123.0)
    late, wait = asyncio.Event(), asyncio.wait

    async def until_late(tasks, *, timeout=None, **given):
        """Wait for a chunk to be read until the test says that it is late."""
        if timeout != service.CHUNK_TIMEOUT_S:
            return await wait(tasks, timeout=timeout, **given)
        over = asyncio.ensure_future(late.wait())
        done, pending = await wait({*tasks, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        return done - {over}, pending - {over}

    monkeypatch.setattr(asyncio, "wait", until_late)
    draft = session_pb2.FetchArtifactRequest(hash=by_role(catalogue, "draft").hash)
    async with front(model, catalogue=catalogue) as running:
        unread = running.stub.FetchArtifact(draft)
        await until(lambda: running.service._downloads.held == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.stub.FetchArtifact(draft).read()
        assert "has 1 downloads at once, as many as are free" in str(error_from_rpc(refused.value))
        late.set()
        await until(lambda: running.service._downloads.held == 0)
        late.clear()
        assert b"".join([chunk.data async for chunk in running.stub.FetchArtifact(draft)]) == DRAFT
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in unread:
                pass
        error = error_from_rpc(ended.value)
        assert isinstance(error, Unavailable)
        assert "no chunk was read for 123.0 s" in str(error)
