"""Test what comes from the Hugging Face hub, or from its cache, for an id: against a server that speaks its API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, Repository, hub_server
from huggingface_hub import constants

from outrider.artifacts.hub import fetch_draft, fetch_target, hub_id
from outrider.core.errors import ModelRefused, OutriderError, Unavailable

SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
SETTINGS = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "chat_template.jinja": b"{{ messages }}"}
NEVER = {
    "README.md": b"# read",
    "modeling_x.py": b"import os",
    "pytorch_model.bin": b"pickled",
    "onnx/model.safetensors": b"onnx",
    "consolidated.safetensors": b"the same again",
}
WHOLE = {**SETTINGS, "model.safetensors": b"all of the weights", **NEVER}
SHARDED = {
    **SETTINGS,
    "model.safetensors.index.json": json.dumps({"weight_map": {f"w{i}": f for i, f in enumerate(SHARDS)}}).encode(),
    **{shard: shard.encode() for shard in SHARDS},
    **NEVER,
}
DRAFT = b"GGUF" + bytes(1_000_000)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    repositories = {
        "org/whole": Repository(WHOLE, revisions=("main", "v1")),
        "org/sharded": Repository(SHARDED),
        "org/private": Repository(WHOLE, private=True),
        "org/gated": Repository(WHOLE, gated=True),
        "org/draft": Repository({"draft-q8.gguf": DRAFT, "config.json": b"{}"}),
        "org/drafts": Repository({"a.gguf": b"GGUFa", "sub/b.gguf": b"GGUFb", "pytorch_model.bin": b"pickled"}),
    }
    with hub_server(repositories) as served:
        _point_at(served.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield served


def _point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("org/name", ("org/name", "main", "")),
        ("org/na.me-2@refs/pr/1", ("org/na.me-2", "refs/pr/1", "")),
        ("org/name-GGUF@v1:sub/f.gguf", ("org/name-GGUF", "v1", "sub/f.gguf")),
        *((path, None) for path in ("org/name.gguf", "name", "/org/name", "./org/name", "~/name", "org/name/more")),
        ("org/name:../../f.gguf", None),
    ],
)
def test_an_id_is_told_from_a_path(given: str, found: object) -> None:
    assert hub_id(given) == found


@pytest.mark.parametrize("given", ["org/whole", "org/whole@v1", "org/sharded"])
def test_of_a_target_its_settings_and_safetensors_are_fetched_once_and_nothing_else(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    repository = hub.repositories[given.partition("@")[0]]
    folder = fetch_target(given)
    wanted = {name: data for name, data in repository.files.items() if name not in NEVER}
    assert folder.name == repository.commit and {file.name: file.read_bytes() for file in folder.iterdir()} == wanted
    hub.fetched.clear()
    assert fetch_target(given) == folder
    _point_at("http://127.0.0.1:9", monkeypatch)
    assert fetch_target(given) == folder  # the hub cannot be reached
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_target(given) == folder and hub.fetched == []


def test_named_chat_templates_are_fetched_from_their_folder(hub: Hub) -> None:
    named = "additional_chat_templates/tool_use.jinja"
    hub.repositories["org/named"] = Repository({**WHOLE, named: b"{{ tools }}", "adapter/adapter.json": b"{}"})
    folder = fetch_target("org/named")
    assert (folder / named).read_bytes() == b"{{ tools }}"
    assert [one.name for one in folder.iterdir() if one.is_dir()] == ["additional_chat_templates"]


def test_a_draft_that_breaks_off_goes_on_and_the_only_gguf_file_needs_no_name(hub: Hub) -> None:
    hub.breaks["draft-q8.gguf"] = 500_000
    for given, name, data in (
        ("org/draft", "draft-q8.gguf", DRAFT),
        ("org/draft:draft-q8.gguf", "draft-q8.gguf", DRAFT),
        ("org/drafts@main:sub/b.gguf", "sub/b.gguf", b"GGUFb"),
    ):
        path = fetch_draft(given)
        assert str(path).endswith(f"/{name}") and path.read_bytes() == data
    assert {name for name, _ in hub.fetched} == {"draft-q8.gguf", "sub/b.gguf"}


def test_what_cannot_be_fetched_is_said_in_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(given: str) -> OutriderError:
        fetch, name = (fetch_draft, "--draft") if "draft" in given else (fetch_target, "--model")
        with pytest.raises(OutriderError) as caught:
            fetch(given)
        assert str(caught.value).startswith(f"{name} {given}: ") and "\n" not in str(caught.value)
        return caught.value

    for given, said in {
        "org/none": "Repository Not Found",
        "org/private": "authenticated",
        "org/gated": "gated",
        "org/whole@v9": "Revision Not Found",
        "org/whole:model.safetensors": "a target is a whole repository; leave out :model.safetensors",
        "org/na--me": "Cannot have --",
        "org/drafts": "several GGUF files; add one of them: :a.gguf, :sub/b.gguf",
        "org/drafts:c.gguf": "Entry Not Found",
        "org/drafts:pytorch_model.bin": "a draft is a GGUF file, whose name ends in .gguf, got pytorch_model.bin",
    }.items():
        assert said in str(error := refusal(given)) and isinstance(error, ModelRefused), error
    hub.failing.add("model.safetensors")
    assert "503" in str(error := refusal("org/whole")) and isinstance(error, Unavailable)
    _point_at("http://127.0.0.1:9", monkeypatch)
    assert "(ConnectError)" in str(error := refusal("org/draft")) and isinstance(error, Unavailable)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in str(error := refusal("org/draft")) and isinstance(error, ModelRefused)


def test_a_token_opens_what_is_private_or_gated(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert fetch_target("org/private").is_dir() and fetch_target("org/gated").is_dir()
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    with pytest.raises(ModelRefused, match="credentials"):
        fetch_target("org/whole")
