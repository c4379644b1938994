"""Test what comes from the Hugging Face hub, or from its cache, for an id: against a server that speaks its API.

Each fetch is a process of its own, since huggingface_hub reads its variables when it is imported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub_server import Hub, Repository, hub_server

from outrider.artifacts.hub import hub_id

FETCH = """
import logging, os, sys
from outrider.artifacts import hub
from outrider.core.errors import OutriderError
logging.basicConfig(level=logging.INFO)
hub.TELL_S = 0.0
hub.ANSWER_TIMEOUT_S = float(os.environ.get("TEST_ANSWER_TIMEOUT_S", hub.ANSWER_TIMEOUT_S))
try:
    print("=", getattr(hub, f"fetch_{sys.argv[1]}")(sys.argv[2], tell=lambda text: print("-", text, flush=True)))
except OutriderError as error:
    print("!", type(error).__name__, error)
"""
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
SETTINGS = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "chat_template.jinja": b"{{ messages }}"}
NEVER = {
    "README.md": b"# read",
    "modeling_x.py": b"import os",
    "pytorch_model.bin": b"pickled",
    "model.pth": b"pickled",
    "pytorch_model.bin.index.json": b"{}",
    "onnx/config.json": b"[]",
    "onnx/model.safetensors": b"onnx",
}
WHOLE = {**SETTINGS, "model.safetensors": b"all of the weights", **NEVER}
SHARDED = {
    **SETTINGS,
    "model.safetensors.index.json": json.dumps({"weight_map": {f"w{i}": f for i, f in enumerate(SHARDS)}}).encode(),
    **{shard: shard.encode() for shard in SHARDS},
    "consolidated.safetensors": b"the same again",
    **NEVER,
}
DRAFT = b"GGUF" + bytes(30_000_000)


@dataclass
class Outcome:
    """What a fetch has printed."""

    path: Path | None
    refusal: str
    told: list[str]
    log: str


Fetch = Callable[..., Outcome]


@pytest.fixture
def hub() -> Iterator[Hub]:
    repositories = {
        "org/whole": Repository(WHOLE, revisions=("main", "v1")),
        "org/sharded": Repository(SHARDED),
        "org/private": Repository(WHOLE, private=True),
        "org/gated": Repository(WHOLE, gated=True),
        "org/pickled": Repository({**SETTINGS, "pytorch_model.bin": b"pickled"}),
        "org/tokenless": Repository({"config.json": b"{}", "model.safetensors": b"w"}),
        "org/huge": Repository(WHOLE, claimed=10**16),
        "org/draft": Repository({"draft-q8.gguf": DRAFT, "config.json": b"{}"}),
        "org/drafts": Repository({"a.gguf": b"GGUFa", "sub/b.gguf": b"GGUFb", "pytorch_model.bin": b"pickled"}),
    }
    with hub_server(repositories) as served:
        yield served


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}


@pytest.fixture
def fetch(environment: dict[str, str], tmp_path: Path) -> Fetch:
    def run(kind: str, given: str, **variables: str) -> Outcome:
        command = [sys.executable, "-c", FETCH, kind, given]
        environ = environment | {"PYTHONPATH": os.getcwd()} | variables
        ran = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        lines = [line.partition(" ")[::2] for line in ran.stdout.splitlines()]
        paths = [Path(text) for mark, text in lines if mark == "="]
        refusals = [text for mark, text in lines if mark == "!"]
        assert ran.returncode == 0 and len(paths) + len(refusals) == 1, ran.stderr
        told = [text for mark, text in lines if mark == "-"]
        return Outcome(paths[0] if paths else None, "".join(refusals), told, ran.stderr)

    return run


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("org/name", ("org/name", "main", "")),
        ("org/na.me-2@refs/pr/1", ("org/na.me-2", "refs/pr/1", "")),
        ("org/name:sub/f.gguf", ("org/name", "main", "sub/f.gguf")),
        ("org/name-GGUF@v1:f.gguf", ("org/name-GGUF", "v1", "f.gguf")),
        ("org/name.gguf", None),
        ("name", None),
        ("name@v1:f.gguf", None),
        ("/org/name", None),
        ("./org/name", None),
        ("../org", None),
        ("~/name", None),
        ("org/name/more", None),
        ("org/name@", None),
        ("org/name:f@v1", None),
        ("org/name:../../f.gguf", None),
        ("org/name:a..b/f.gguf", ("org/name", "main", "a..b/f.gguf")),
    ],
)
def test_an_id_is_told_from_a_path(given: str, found: object) -> None:
    assert hub_id(given) == found
    assert given.startswith("./") or hub_id(Path(given)) == found


def test_what_is_here_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_id("org/name") is not None
    Path("org").mkdir()
    assert hub_id("org/name") is not None
    Path("org/name").symlink_to("nowhere")
    assert hub_id("org/name") is None


@pytest.mark.parametrize("given", ["org/whole", "org/whole@v1", "org/sharded"])
def test_of_a_target_its_settings_and_safetensors_are_fetched_once_and_nothing_else(
    hub: Hub, fetch: Fetch, given: str
) -> None:
    repository = hub.repositories[given.partition("@")[0]]
    wanted = {*SETTINGS, *(["model.safetensors"] if "whole" in given else ["model.safetensors.index.json", *SHARDS])}
    first = fetch("target", given)
    assert first.path is not None and first.path.name == repository.commit
    assert {file.name: file.read_bytes() for file in first.path.iterdir()} == {
        name: data for name, data in repository.files.items() if name in wanted
    }
    assert sorted(name for name, _ in hub.fetched) == sorted(wanted)
    assert first.told[0].startswith(f"fetching {given.partition('@')[0]} at commit {repository.commit}: ")
    assert first.told[-1] == f"{given} is commit {repository.commit}, in {first.path}"
    assert first.log == ""
    hub.fetched.clear()
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        again = fetch("target", given, **variables)
        assert (again.path, hub.fetched, again.told[-1]) == (first.path, [], first.told[-1])
        assert not any(line.startswith("fetching") for line in again.told)
    assert "127.0.0.1:9 cannot be reached (ConnectError" in again.told[0] and "from the cache" in again.told[0]


def test_a_commit_hash_is_a_revision(hub: Hub, fetch: Fetch) -> None:
    commit = hub.repositories["org/whole"].commit
    found = fetch("target", f"org/whole@{commit}").path
    assert found is not None and found.name == commit


def test_the_only_gguf_file_needs_no_name_and_others_do(hub: Hub, fetch: Fetch) -> None:
    for given, name, data in (
        ("org/draft", "draft-q8.gguf", DRAFT),
        ("org/draft:draft-q8.gguf", "draft-q8.gguf", DRAFT),
        ("org/drafts@main:sub/b.gguf", "sub/b.gguf", b"GGUFb"),
    ):
        found = fetch("draft", given)
        assert found.path is not None and str(found.path).endswith(f"/{name}") and found.path.read_bytes() == data
        assert found.told[-1].startswith(f"{given} is {name} of commit ")
    assert [name for name, _ in hub.fetched] == ["draft-q8.gguf", "sub/b.gguf"]


@pytest.mark.parametrize(
    ("kind", "given", "variables", "said"),
    [
        (
            "target",
            "org/none",
            {},
            "ModelRefused --model org/none: no such path here, and {url} has no such repository, ",
        ),
        ("target", "org/none", {}, "or a private one; check the name, or set HF_TOKEN"),
        ("target", "org/none", {"HF_TOKEN": "hf_good"}, "check the name, and whether the token in HF_TOKEN or of `hf"),
        ("target", "org/private", {}, "or a private one; check the name, or set HF_TOKEN"),
        ("target", "org/gated", {}, "the repository is gated: accept its terms at {url}/org/gated; set HF_TOKEN to a"),
        (
            "target",
            "org/whole",
            {"HF_TOKEN": "hf_bad"},
            "{url} refuses the token in HF_TOKEN or of `hf auth login` (401)",
        ),
        (
            "target",
            "org/whole@v9",
            {},
            "the repository has no revision v9; give a branch, a tag or a whole commit hash",
        ),
        ("target", "org/whole:model.safetensors", {}, "a target is a whole repository; leave out :model.safetensors"),
        ("target", "org/na--me", {}, "no such path here, and no id on the hub: HFValidationError"),
        ("target", "org/pickled", {}, "the repository has no *.safetensors"),
        ("target", "org/tokenless", {}, "the repository has no tokenizer.json"),
        ("target", "org/huge", {}, "are to come, and {home}/hub has room for "),
        ("target", "org/whole", {"HF_HOME": "/dev/null/hf"}, "can /dev/null/hf/hub be written?"),
        (
            "draft",
            "org/drafts",
            {},
            "--draft org/drafts: the repository has several GGUF files; add one of them: :a.gguf, ",
        ),
        ("draft", "org/drafts:c.gguf", {}, "has no c.gguf; of GGUF files it has :a.gguf, :sub/b.gguf"),
        ("draft", "org/drafts:pytorch_model.bin", {}, "a draft is a GGUF file, whose name ends in .gguf, got pytorch"),
        ("draft", "org/whole", {}, "the repository has no *.gguf"),
        (
            "target",
            "org/whole",
            {"HF_HUB_OFFLINE": "1"},
            "ModelRefused --model org/whole: no such path here, not in the ca",
        ),
        (
            "target",
            "org/whole",
            {"HF_HUB_OFFLINE": "1"},
            "HF_HUB_OFFLINE keeps it from being fetched; unset that, or fill",
        ),
        (
            "draft",
            "org/draft",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "Unavailable --draft org/draft: no such path here, ",
        ),
        ("draft", "org/draft", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "127.0.0.1:9 cannot be reached (ConnectError: "),
    ],
)
def test_what_cannot_be_fetched_is_said_in_one_sentence(
    hub: Hub, fetch: Fetch, tmp_path: Path, kind: str, given: str, variables: dict[str, str], said: str
) -> None:
    found = fetch(kind, given, **variables)
    assert said.format(url=hub.url, home=tmp_path / "hf") in found.refusal
    assert (found.log, hub.fetched) == ("", [])


def test_a_token_opens_what_is_private_or_gated(fetch: Fetch) -> None:
    assert fetch("target", "org/private", HF_TOKEN="hf_good").path is not None
    assert fetch("target", "org/gated", HF_TOKEN="hf_good").path is not None


def test_an_index_that_names_what_is_no_safetensors_or_not_there_is_refused(hub: Hub, fetch: Fetch) -> None:
    for shard, said in (
        ("pytorch_model.bin", "its index names pytorch_model.bin; only safetensors are fetched"),
        ("m.safetensors", "its index names m.safetensors; the repository has no file of that name"),
    ):
        index = json.dumps({"weight_map": {"w": shard}}).encode()
        files = {name: data for name, data in WHOLE.items() if name != "model.safetensors"}
        hub.repositories["org/wrong"] = Repository({**files, "model.safetensors.index.json": index})
        assert said in fetch("target", "org/wrong").refusal


def test_without_the_hub_a_cache_that_lacks_a_file_is_refused_by_its_name(fetch: Fetch) -> None:
    found = fetch("target", "org/sharded")
    assert found.path is not None
    for name, said in (
        (
            SHARDS[1],
            f"its index names {SHARDS[1]}; the cache has no file of that name of it, and HF_HUB_OFFLINE keeps it",
        ),
        ("tokenizer.json", "the cache has no tokenizer.json of it, and HF_HUB_OFFLINE keeps it"),
    ):
        (found.path / name).unlink()
        assert said in fetch("target", "org/sharded", HF_HUB_OFFLINE="1").refusal


@pytest.mark.parametrize("how", ["end", "reset"])
def test_a_download_that_breaks_off_goes_on_and_says_how_far_it_is(hub: Hub, fetch: Fetch, how: str) -> None:
    hub.breaks["draft-q8.gguf"] = [(12_000_000, how)]  # type: ignore[list-item]
    found = fetch("draft", "org/draft")
    assert found.path is not None and found.path.read_bytes() == DRAFT
    assert (
        "fetching org/draft: 10.5 MB of 30.0 MB" in found.told
        and "fetching org/draft: 30.0 MB of 30.0 MB" in found.told
    )
    shares = [float(line.split()[2]) for line in found.told if line.endswith("MB of 30.0 MB")]
    assert shares == sorted(shares) or how == "reset"  # which begins again
    assert found.log == ""  # huggingface_hub's own lines hold signed addresses
    starts = [start for _, start in hub.fetched]
    if how == "end":
        assert starts == [0, 10_485_760]  # what a connection's end leaves is kept
    else:
        assert len(starts) == 2 and any("the download of org/draft broke off (" in line for line in found.told)


def test_a_server_that_goes_on_failing_is_named_and_whole_files_are_kept(hub: Hub, fetch: Fetch) -> None:
    hub.failing.add(SHARDS[1])
    found = fetch("target", "org/sharded")
    assert found.refusal == f"Unavailable --model org/sharded: {hub.url} answers with HTTP status 503; try again later"
    assert sum("broke off" in line for line in found.told) == 2
    hub.failing.clear()
    hub.fetched.clear()
    assert fetch("target", "org/sharded").path is not None
    assert [name for name, _ in hub.fetched] == [SHARDS[1]]


@pytest.mark.parametrize("listings", [0, 1, 2])
def test_a_hub_that_falls_silent_before_a_listing_is_given_up(hub: Hub, fetch: Fetch, listings: int) -> None:
    hub.listings = listings
    begun = time.monotonic()
    found = fetch("draft", "org/draft", TEST_ANSWER_TIMEOUT_S="0.5")
    assert time.monotonic() - begun < 25
    assert found.refusal.startswith("Unavailable --draft org/draft: ")
    assert (
        "(ReadTimeout: timed out); check the network",
        "the download broke off (ReadTimeout: timed out)",
        "the download broke off (ConnectionError: no answer in 3 times 0.5 s)",
    )[listings] in found.refusal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_download_at_once_and_leaves_no_half_file(
    hub: Hub, environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    hub.breaks["draft-q8.gguf"] = [(12_000_000, "stall")]
    command = [sys.executable, "-c", FETCH, "draft", "org/draft"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        assert hub.stalled.wait(30)
        time.sleep(0.2)
        assert list(tmp_path.rglob("*.incomplete"))
        process.send_signal(number)
        assert process.wait(5) == 128 + number
    assert list(tmp_path.rglob("*.incomplete")) == []
