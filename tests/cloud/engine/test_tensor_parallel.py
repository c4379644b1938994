"""Test that two ranks that share a target, as processes over gloo, compute the same as one."""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from demanded import demand
from tiny_targets import SHAPE

from cloud_verifier.engine.torch_backend.batch import PackedBatch, Segment
from cloud_verifier.engine.torch_backend.parallel import rank_messages, tensor_parallel
from cloud_verifier.engine.torch_backend.parallel.tensor_parallel import RankGroup, RankInfo
from outrider.core.errors import BadRequest, InternalError, ModelRefused

HERE = Path(__file__).parent
SCRIPT = str(HERE / "rank_script.py")
TIMEOUT_S = 100


@pytest.fixture
def needs_accelerate() -> None:
    demand("accelerate", "a model that transformers splits")


def environment(**more: str) -> dict[str, str]:
    folders = [os.getcwd(), str(HERE), str(HERE.parent), str(HERE.parents[1] / "support")]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more


def torchrun(*arguments: object) -> list[dict[str, Any]]:
    """Return what two ranks of our script print, one dictionary per line."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [sys.executable, *launch, SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(),
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def save_llama(directory: Path, seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**copy.deepcopy(SHAPE) | changes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.usefixtures("needs_accelerate")
def test_two_ranks_give_the_logits_and_the_tokens_of_one(tiny_directory: Callable[[str], Path]) -> None:
    said = torchrun("equal", tiny_directory("llama"), tiny_directory("qwen3"))
    assert [one["kind"] for one in said] == ["llama", "qwen3"]
    for one in said:
        assert one["difference"] < 1e-5
        assert one["deviation"] < 1e-4
        assert one["same"]
        assert "this one was replaced by a newer" in one["older"]
        assert one["repeats"]  # after that refusal too
        assert one["tokens"] == 2 * 3 * 16
        assert one["differs_by_sampling"]
        assert one["heads"] == [1, 1]  # each rank holds half of the keys and values
        assert one["whole_heads"] == [2, 2]
        assert one["backend"] == "sdpa+tp2"


@pytest.mark.usefixtures("needs_accelerate")
def test_a_model_that_cannot_be_split_is_refused_by_every_rank(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = save_llama(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    said = torchrun(
        "refused",
        save_llama(tmp_path / "one_head", num_key_value_heads=1),
        save_llama(tmp_path / "odd", intermediate_size=63),
        tiny_directory("gpt2"),
        broken,
        tmp_path / "nowhere",
        tiny_directory("llama"),
        save_llama(tmp_path / "other"),
    )
    assert sorted(one["rank"] for one in said) == [0, 1]
    for one in said:
        for reason, expected in zip(
            one["reasons"],
            [
                "num_key_value_heads is 1, must be a multiple of 2",
                "intermediate_size is 63, must be a multiple of 2",
                "transformers has no tensor-parallel plan for it",
                "broken does not load on 2 ranks: ",
                "has no config.json",
                "attention is exact, must be sdpa with 2 ranks",
                "rank 1 has read other weights than rank 0",
            ],
            strict=True,
        ):
            assert expected in reason


@pytest.mark.usefixtures("needs_accelerate")
@pytest.mark.parametrize(("how", "within_s"), [(signal.SIGKILL, 3.0), (signal.SIGSTOP, 8.0)])
def test_a_rank_that_is_lost_ends_the_engine_with_a_clear_error(
    how: signal.Signals, within_s: float, tiny_directory: Callable[[str], Path]
) -> None:
    # Not by torchrun, which would end rank 0 before it can say a word.
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, "lost", str(tiny_directory("llama"))],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                SIGNAL=str(int(how)),
            ),
        )
        for rank in range(2)
    ]
    try:
        out, _ = ranks[0].communicate(timeout=TIMEOUT_S)
        first, second = [json.loads(line) for line in out.splitlines()]
        assert "the 2 ranks of the target are no longer in step" in first["error"]
        assert first["committed"] > 0
        assert first["seconds"] < within_s
        assert second["error"] == first["error"]
        assert second["seconds"] < 0.5  # nobody is asked again
        assert ranks[0].returncode == 0
    finally:
        for process in ranks:
            process.kill()
            process.wait()


# --- what needs no second process


def segment(tokens: list[int], chain: int, parents: list[int], prefix: list[int], *, wants_logits: bool) -> Segment:
    positions = np.arange(len(prefix), len(prefix) + len(tokens))
    slots = np.arange(40, 40 + len(tokens), dtype=np.int32)
    return Segment(
        np.asarray(tokens),
        chain,
        np.asarray(parents, dtype=np.int64),
        positions,
        np.asarray(prefix, dtype=np.int32),
        slots,
        wants_logits,
    )


SEGMENTS = (
    segment([3, 1, 4], 3, [], [], wants_logits=False),
    segment([9, 2, 6, 5], 2, [1, 2], [7, 8, 30], wants_logits=True),
    replace(segment([5, 3, 5, 8], 4, [], [31], wants_logits=True), scored=range(1, 3)),
    replace(segment([9, 7], 2, [], [], wants_logits=False), scored=range(2)),
)


def test_rows_that_score_a_prompt_come_before_those_that_choose_tokens() -> None:
    batch = PackedBatch.pack(SEGMENTS)
    assert batch.logit_rows.tolist() == [4, 5, 6, 8, 9, 10, 11, 12]
    assert batch.logit_starts == (0, 0, 5, 8)


def test_a_packed_batch_survives_the_way_to_another_rank() -> None:
    batch = PackedBatch.pack(SEGMENTS)
    message = rank_messages.decode(*rank_messages.encode(rank_messages.Forward.of(batch, 3, 256)))
    assert isinstance(message, rank_messages.Forward)
    assert (message.pool, message.pool_slots) == (3, 256)
    back = message.batch(torch.device("cpu"))
    for name in ("input_ids", "position_ids", "logit_rows"):
        assert torch.equal(getattr(back, name), getattr(batch, name))
        assert getattr(back, name).dtype == getattr(batch, name).dtype
    for one, other in zip(back.segments, SEGMENTS, strict=True):
        assert (one.chain, one.wants_logits) == (other.chain, other.wants_logits)
        for name in ("tokens", "parents", "positions", "prefix", "slots"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
        assert np.array_equal(one.visible(), other.visible())


def test_other_messages_survive_too() -> None:
    for message in (None, [5, 0, 7]):
        assert rank_messages.decode(*rank_messages.encode(message)) == message


def test_a_message_that_is_cut_short_or_of_another_kind_is_an_error() -> None:
    kind, numbers = rank_messages.encode(rank_messages.Forward.of(PackedBatch.pack(SEGMENTS), 1, 64))
    for wrong in (numbers[:-1], numbers[:2], np.append(numbers, 0).astype(np.int32)):
        with pytest.raises(InternalError, match="a rank message has"):
            rank_messages.decode(kind, wrong)
    with pytest.raises(InternalError, match="of kind 9"):
        rank_messages.decode(9, numbers)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "RANK, WORLD_SIZE, LOCAL_RANK is not set to a number: start the ranks with torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "RANK is 0 of WORLD_SIZE 1, must be one of at least 2"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK is not set to a number"),
    ],
)
def test_a_process_that_is_no_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], said: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadRequest, match=said):
        RankInfo.of_environment()


def test_a_rank_takes_the_gpu_of_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "64"}.items():
        monkeypatch.setenv(name, value)
    for device, said in (("cuda:1", "must be cpu or cuda"), ("cuda", "rank 1 needs GPU 64")):
        with pytest.raises(BadRequest, match=said), RankGroup.join(device):
            pass


def test_without_accelerate_a_target_of_several_ranks_is_refused_by_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tensor_parallel, "is_accelerate_available", lambda: False)
    with pytest.raises(ModelRefused, match=r"accelerate is not installed.*pip install 'outrider\[parallel\]'"):
        RankGroup(RankInfo(0, 2, 0), "cpu", None).load(tmp_path)
