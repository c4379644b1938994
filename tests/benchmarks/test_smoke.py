"""Test that each benchmark runs to its end at its smoke size, and that its last line has its keys and keeps its
promises.

A verifier that several of them can use is started once.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from benchmarks import (
    capacity,
    capacity_gpu,
    co_located,
    constrained,
    counters,
    distill_losses,
    engine,
    engine_gpu,
    exact,
    failover,
    fleet,
    footprint,
    front,
    latency,
    long_context,
    lossless,
    overhead,
    overload,
    rules,
    soak,
    sources,
    swarm,
    vocabulary,
)
from benchmarks.attack import __main__ as attack
from benchmarks.capacity import CapacityClusters
from benchmarks.chaos import __main__ as chaos
from benchmarks.distill import __main__ as distill
from benchmarks.support import engine_options, harness
from benchmarks.support.draft_replay.client import ServiceAddress
from benchmarks.support.harness import Pair
from benchmarks.support.hf_baseline import TimedOutput
from benchmarks.window import __main__ as window
from benchmarks.window.plan import PACED
from benchmarks.window.testbed import CorePair, RunningVerifier, VerifierMachine, WindowTestbed
from cloud_verifier.engine.server_draft.head_models import HeadsFile, HeadsShape, new_heads, save_heads
from coordinator.cluster import Cluster
from outrider.core.errors import BadRequest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1_800)]
in_shared_loop = pytest.mark.asyncio(loop_scope="module")
"""Tests of benchmarks that share clusters run in one event loop."""

SMOKE = ["--smoke"]
WITH_VLLM = ["--engine", "vllm"]
needs_vllm = pytest.mark.skipif(not os.environ.get(engine_options.PYTHON), reason="needs vLLM: make test-vllm")
VS_VLLM = {"ar_vs_vllm", "prefill_vs_vllm", "ragged_vs_vllm", "wall_vs_vllm"}
"""Keys over vLLM; `eager_vs_vllm` has all of them again."""


@pytest.fixture(scope="module", autouse=True)
def undisturbed_process() -> Iterator[None]:
    """Restore this process's environment, which benchmarks change for the clusters that they start."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(autouse=True)
def all_cores() -> Iterator[None]:
    """Restore this process's cores, since a benchmark pins it to one."""
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@contextlib.asynccontextmanager
async def unpinned(*options: str, coordinator: bool) -> AsyncIterator[Cluster]:
    """Run a verifier, and leave this process on all its cores."""
    cores = os.sched_getaffinity(0)
    pair = Pair.in_folder(harness.ROOT / "models")
    async with harness.one_verifier(pair, *options, coordinator=coordinator) as cluster:
        os.sched_setaffinity(0, cores)
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def coordinated() -> AsyncIterator[Cluster]:
    async with unpinned("--kv-slots", str(soak.KV_SLOTS), coordinator=True) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def direct() -> AsyncIterator[Cluster]:
    async with unpinned("--max-sessions", str(overload.SMOKE.places), coordinator=False) as cluster:
        yield cluster


def share(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    """Make a benchmark use this cluster instead of one of its own."""

    @contextlib.asynccontextmanager
    async def one_verifier(*_: object, **__: object) -> AsyncIterator[Cluster]:
        yield cluster

    monkeypatch.setattr(harness, "one_verifier", one_verifier)


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    last: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return last


@in_shared_loop
async def test_lossless(
    coordinated: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    share(monkeypatch, coordinated)
    await lossless.main(SMOKE)
    last = last_line(capsys)
    assert last.keys() == {"prompts", "tokens", "mismatches", "ties", "engines", "between", "moved"}
    assert (last["prompts"], last["mismatches"]) == (1, 0)
    assert last["tokens"] > 0
    assert_equal_within(last["engines"]["torch"])


def assert_equal_within(within: dict[str, Any]) -> None:
    assert (within["requests"], within["equal"] + len(within["ties"]), within["mismatches"]) == (12, 9, 0)
    assert within["resumed"] >= 1
    assert within["tokens"] > 12


@in_shared_loop
@needs_vllm
async def test_lossless_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    await lossless.main([*SMOKE, "--only", "engines"])
    last = last_line(capsys)
    assert last.keys() == {"engines", "between", "moved"}
    assert last["engines"].keys() == {"torch", "vllm"}
    for within in last["engines"].values():
        assert_equal_within(within)
    assert last["between"].keys() == {"greedy", "sampled", "penalised"}
    assert sum(setting["equal"] + len(setting["ties"]) for setting in last["between"].values()) == 3
    assert (last["moved"]["requests"], last["moved"]["mismatches"]) == (1, 0)
    assert last["moved"]["attaches"] >= 3, "from our engine to vLLM and back"


@in_shared_loop
async def test_latency(
    coordinated: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    share(monkeypatch, coordinated)
    await latency.main(SMOKE)
    last = last_line(capsys)
    bare = ("streaming_over_bare_forward", "streaming_over_own_forward", "streaming_over_generate")
    ratios = ("speedup_vs_streaming", "speedup_vs_hf", *bare)
    for ratio in (*ratios, "tokens_per_step"):
        assert last[ratio].keys() == {"greedy", "T=0.8"}
        assert all(value is None or value > 0 for value in last[ratio].values())
    assert last.keys() >= {"bytes_up_per_token", "bytes_down_per_token", "excluded_repetitive"}


@in_shared_loop
@needs_vllm
async def test_latency_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    await latency.main([*SMOKE, *WITH_VLLM])
    last = last_line(capsys)
    over_torch = {"drafted_over_torch", "streamed_over_torch"}
    shared = {"speedup_vs_streaming", "speedup_vs_hf", "streaming_over_bare_forward", "tokens_per_step"}
    assert last["vllm"].keys() == over_torch | shared
    for figure in last["vllm"].values():
        assert figure.keys() == {"greedy", "T=0.8"}
        assert all(value is None or value > 0 for value in figure.values())
    assert last["excluded_different"] + last["excluded_repetitive"] < 4, "nothing was compared"


@in_shared_loop
async def test_swarm(coordinated: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    share(monkeypatch, coordinated)
    await swarm.main(SMOKE)
    last = last_line(capsys)
    assert last["wrong_tokens"] == 0
    for figure in (
        *("acceptance_over_live", "tokens_per_step_over_live"),
        *("tokens_per_step_live", "tokens_per_step_replayed"),
    ):
        assert last[figure].keys() == {"greedy", "T=0.8"}
        assert min(last[figure].values()) > 0


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.asyncio
async def test_front(capsys: pytest.CaptureFixture[str], processes: str) -> None:
    await front.main([*SMOKE, "--front-processes", processes])
    last = last_line(capsys)
    assert last.keys() == {"cpu_us_per_session_step", "added_ms_p99"}
    assert last["cpu_us_per_session_step"] > 0
    assert last["added_ms_p99"].keys() == {"2", "4"}
    assert all(added_ms > 0 for added_ms in last["added_ms_p99"].values())


@in_shared_loop
async def test_soak(coordinated: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    share(monkeypatch, coordinated)
    await soak.main(SMOKE)
    last = last_line(capsys)
    assert [last[promise] for promise in ("leaked_slots", "differing", "errors", "wrong_endings")] == [0, 0, 0, 0]
    assert last["sessions"] > 0
    assert last["attacks"] > 0
    assert last.keys() >= {"rss_growth_mb", "p50_ms", "p99_ms", "p50_ms_without_attacker", "p99_ms_without_attacker"}


@in_shared_loop
async def test_overhead(direct: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    share(monkeypatch, direct)
    await overhead.main(SMOKE)
    last = last_line(capsys)
    ratios = {"http_over_sdk", "sdk_over_stream", "http_over_sdk_first", "sdk_over_stream_first"}
    assert last.keys() == {*ratios, "health_ms", "sdk_first_ms", "http_first_ms"}
    assert min(last.values()) > 0


@in_shared_loop
async def test_overload(direct: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    share(monkeypatch, direct)
    await overload.main(SMOKE)
    last = last_line(capsys)
    assert (last["differing"], last["errors"]) == (0, 0)
    assert last["peak_tokens_per_s"] > 0
    assert last.keys() >= {"goodput_share_of_peak", "arrivals", "shed", "refusals", "refusal_p50_ms", "refusal_p99_ms"}


@in_shared_loop
async def test_failover(capsys: pytest.CaptureFixture[str]) -> None:
    await failover.main(SMOKE)
    last = last_line(capsys)
    assert [last[promise] for promise in ("lost", "duplicated", "differing", "zombie_accepted")] == [0, 0, 0, 0]
    assert last["runs"] == 2
    assert last["zombie_refused"] > 0
    for figure in ("resume_ms", "kill9_resume_ms", "sigstop_resume_ms"):
        assert 0 < last[f"{figure}_p50"] <= last[f"{figure}_max"]


@in_shared_loop
async def test_chaos(capsys: pytest.CaptureFixture[str]) -> None:
    await chaos.main(SMOKE)
    last = last_line(capsys)
    promises = ("differing", "lost", "stuck", "leaked_places", "leaked_slots", "untyped", "violations", "error_lines")
    assert {promise: last[promise] for promise in promises} == dict.fromkeys(promises, 0)
    assert last["faults"] == chaos.SMOKE.faults
    assert last["equal"] > 0
    assert last["worst_pause_s"] > 0


@in_shared_loop
async def test_capacity(
    coordinated: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = CapacityClusters._cluster

    async def shared(self: CapacityClusters, *options: str, controlled: bool = False) -> tuple[Cluster, ServiceAddress]:
        """Start a verifier of its own only for a server draft."""
        if options:
            return await start(self, *options, controlled=controlled)
        return coordinated, ServiceAddress(coordinated.verifiers[0].address, coordinated.address)

    monkeypatch.setattr(CapacityClusters, "_cluster", shared)
    await capacity.main(SMOKE)
    last = last_line(capsys)
    ratios = ("vs_autoregression", "controlled_vs_autoregression", "vs_server_draft", "server_draft_bound")
    ratios += ("vs_without_devices", "controlled_vs_without_devices", "both_vs_without_devices")
    for ratio in (*ratios, "both_over_best", "both_controlled_vs_without_devices"):
        assert list(last[ratio]) == ["1"]
        assert last[ratio]["1"] > 0
    assert last.keys() >= {"draft_over_target", "gpu"}
    assert all(speed["1"] > 0 for speed in last["tokens_per_s"].values())


@in_shared_loop
@needs_vllm
async def test_capacity_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    await capacity.main([*SMOKE, *WITH_VLLM])
    last = last_line(capsys)
    assert last["vllm"].keys() == {
        *("autoregression_over_torch", "device_over_torch", "controlled_over_torch", "vs_autoregression"),
        *("controlled_vs_autoregression", "tokens_per_step", "vllm_tokens_per_step"),
    }
    for figure in last["vllm"].values():
        assert list(figure) == ["1"]
        assert figure["1"] > 0


@in_shared_loop
async def test_long_context(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    await long_context.main(SMOKE)
    torch.set_num_threads(threads)
    last = last_line(capsys)
    assert last.keys() == {"positions", "contexts", "short_agreement", "ties", "mismatches"}
    assert last["mismatches"] == 0
    assert last["contexts"].keys() == {str(tokens) for tokens in long_context.SMOKE.contexts}
    for context in last["contexts"].values():
        assert min(context["first_request_s"].values()) > 0
        assert tuple(context["arms"]) == long_context.ARMS
        for groups in context["arms"].values():
            assert sum(group["texts"] for group in groups.values()) == 2
        streamed = [group["tokens_per_step"] for group in context["arms"][long_context.STREAMING].values()]
        assert set(streamed) <= {1.0, None}


@in_shared_loop
async def test_window(
    coordinated: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.asynccontextmanager
    async def site(
        testbed: WindowTestbed, machine: VerifierMachine, lane: CorePair, *arguments: Any, **options: bool
    ) -> AsyncIterator[RunningVerifier]:
        if any(options.values()):
            async with started_anew(testbed, machine, lane, *arguments, **options) as started:
                yield started
        else:
            where = ServiceAddress(coordinated.verifiers[0].address, coordinated.address)
            yield RunningVerifier(machine, lane, where, coordinated)

    started_anew = WindowTestbed.site

    monkeypatch.setattr(WindowTestbed, "site", site)
    await window.main(SMOKE)
    said = capsys.readouterr().out.splitlines()
    for change in ("to 30 ms", "to 5 ms", "collapse", "recovery"):
        assert any(f"{change}: " in line and "of streaming in the" in line for line in said), change
    last = json.loads(said[-1])
    assert tuple(last) == window.KEYS
    cell = last["cells"]["real CPU, 1, good"]["1"]
    assert tuple(cell) == window.CELL_KEYS
    assert cell["vs_streaming"] == last["worst"]["vs_streaming"] > 0
    assert 0 <= last["calibration_error"] <= 1
    assert last["near"]["least"] <= last["near"]["match"] <= last["near"]["most"]
    assert isinstance(last["not_measured_properly"], list)
    [static] = last["statics"]
    assert min(static["vs_best"], last["vs_best_single_static"], last["paced"]["50"], last["vs_model"]) > 0
    assert last["transition"]["vs_streaming"] > 0
    assert last["crowd"]["slowest"] > 0
    [live] = last["live"]
    assert (live["rtt_ms"], live["texts"]) == (50.0, 2)
    assert min(live["live_vs_streaming"], live["replayed_vs_streaming"]) > 0
    assert live["tokens_per_step"]["streaming"] == 1.0 <= live["tokens_per_step"]["live"]
    [arms] = last["arms"]
    texts = {group: found for group, found in arms.items() if group != "rtt_ms"}
    assert sum(found["texts"] for found in texts.values()) == 3
    for found in texts.values():
        assert found["tokens_per_step"]["streaming"] == 1.0
        assert min(found["over_streaming"].values()) > 0
    [policies] = last["policies"]
    assert set(policies["over_streaming"]) == {"outrider", "ucb windows", "ucb rounds", "specedge"}
    assert min(low for _, low, _ in policies["over_streaming"].values()) > 0
    assert policies["tokens_per_step"]["streaming"] == 1.0 < policies["tokens_per_step"]["specedge"]
    assert min(policies["step_ms"][arm] for arm in ("ucb rounds", "specedge")) >= policies["rtt_ms"] + PACED.pass_ms


@in_shared_loop
@needs_vllm
async def test_window_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    """Both engines' verifiers keep the pace of 30 ms."""
    await window.main([*SMOKE, *WITH_VLLM])
    last = last_line(capsys)
    assert tuple(last) == window.KEYS
    assert [each["rtt_ms"] for each in last["engines"]] == [1.0, 50.0]
    for each in last["engines"]:
        assert min(each["vllm_over_torch"], each["streaming_over_torch"]) > 0
        for figures in (each["torch"], each["vllm"]):
            assert figures["step_ms"] >= 30
            assert figures["tokens_per_step"] >= 1


def test_vllm_without_an_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engine_options.PYTHON, raising=False)
    parser = harness.arguments("latency", "")
    engine_options.add_options(parser)
    assert engine_options.chosen(parser.parse_args([])) == {"torch": ()}
    with pytest.raises(BadRequest, match="vllm_environment"):
        engine_options.chosen(parser.parse_args(["--engine", "vllm"]))


@in_shared_loop
async def test_distill(capsys: pytest.CaptureFixture[str]) -> None:
    await distill.main(SMOKE)
    last = last_line(capsys)
    assert last["tokens_lost"] == 0
    assert last["refused"]
    assert last.keys() == vars(distill.DistillResult()).keys()


def test_distill_losses(capsys: pytest.CaptureFixture[str]) -> None:
    distill_losses.main(SMOKE)
    last = last_line(capsys)
    assert last.keys() == {"before", "reference", "runs", "tokens", "minutes"}
    arms = [("kl", 0), ("tv", 0), ("hybrid", 0), ("hybrid", 16)]
    assert [(run["loss"], run["lora_rank"]) for run in last["runs"]] == arms
    assert last["runs"][0].keys() >= {"gap_closed", "code_loss", "arithmetic", "code"}


def test_engine(capsys: pytest.CaptureFixture[str]) -> None:
    engine.main(SMOKE)
    last = last_line(capsys)
    assert last["step_ms"].keys() == {"1x0", "1x1", "1x8", "2x0", "2x1", "2x8"}
    assert 0 < last["overhead_share_b16"] < 1
    assert min(last[f"ar_{figure}"] for figure in ("b16_vs_best_hf", "ragged_vs_best_hf", "single_vs_hf_assisted")) > 0
    vllm = os.environ.get(engine_options.PYTHON)
    assert {key for key in last if "vllm" in key} == ({*VS_VLLM, "eager_vs_vllm"} if vllm else set())
    if vllm:
        assert last["eager_vs_vllm"].keys() == VS_VLLM
        assert last["ar_vs_vllm"].keys() == last["wall_vs_vllm"]["ar"].keys() == {"1", "2"}
        assert min(last["prefill_vs_vllm"], last["ragged_vs_vllm"], *last["ar_vs_vllm"].values()) > 0


def test_co_located(capsys: pytest.CaptureFixture[str]) -> None:
    co_located.main(SMOKE)
    last = last_line(capsys)
    vllm = os.environ.get(engine_options.PYTHON)
    assert (last["vllm"] is not None) == bool(vllm)
    theirs = {"vllm", "vllm eager", "vllm ngram, 4", "vllm draft, 4"} if vllm else set()
    for setting in ("greedy", "T=0.8"):
        figures = last[setting]
        for at_once in ("1", "2"):
            rates, per_step = (figures[figure][at_once] for figure in ("tokens_per_cpu_s", "tokens_per_step"))
            assert rates.keys() - {co_located.SUFFIX} == {"plain", "sources, 4", "devices", *theirs}
            assert min(rates.values()) > 0
            assert per_step["plain"] == 1.0 < per_step["devices"]
            if vllm:  # unrepaired, it accepts one sampled draft token in twenty steps
                assert per_step["vllm draft, 4"] > 1.2
            compared = ("gain", "devices_over", *(("vllm_gain", "over_vllm") if vllm else ()))
            assert all(0 < least <= middle <= most for middle, least, most in (figures[c][at_once] for c in compared))


def test_the_best_of_several_arms_is_chosen_on_other_rounds_than_it_is_scored_on() -> None:
    def rounds(*rates: float) -> list[TimedOutput]:
        return [TimedOutput((), 1.0, round(100 * rate), 100.0) for rate in rates]

    arms = {"a": rounds(2.0, 2.0, 8.0), "b": rounds(3.0, 3.0, 1.0), "plain": rounds(1.0, 1.0, 1.0)}
    assert co_located.over(arms, ["a", "b"], ["plain"]) == [2.0, 1.0, 2.0]
    once = {name: each[:1] for name, each in arms.items()}
    assert co_located.over(once, ["a", "b"], ["plain"]) == [3.0, 3.0, 3.0]


def test_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = HeadsFile.read(harness.ROOT / "models" / "heads.safetensors")
    medusa = tmp_path / "medusa.safetensors"
    save_heads(medusa, new_heads(HeadsShape(kind="medusa", hidden=shipped.shape.hidden, depth=3)), shipped.target)
    sources.main([*SMOKE, "--medusa", str(medusa)])
    last = last_line(capsys)
    assert last.keys() == {"ngram", "ngram_store", "draft", "narrow", "heads", "mixture_over_best", "arms"}
    assert last["arms"].keys() == {*sources.ARMS, *sources.SERVER_ARMS}
    for settings in last["arms"].values():
        for shown in settings.values():
            assert shown.keys() == {"all", "code", "arithmetic", "chat", "quoting", "repetitive"}
            assert shown["all"]["tokens_per_step"] >= 1


def test_rules(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    rules.main(SMOKE)
    torch.set_num_threads(threads)
    last = last_line(capsys)
    assert last.keys() == {"prompts", "temperature", "sampled", "greedy"}
    lossless = {"coupled", "leviathan", "multi_step", "k_sequential", "without_replacement", "bound"}
    lossy = {"typical", "typical_changed", "threshold", "threshold_changed"}
    assert last["sampled"].keys() == {*lossless, *lossy, "positions"}
    assert last["greedy"].keys() == {"children", *lossy, "positions"}
    for name in ("coupled", "typical", "threshold", "multi_step", "k_sequential", "without_replacement", "bound"):
        assert last["sampled"][name] == sorted(last["sampled"][name])
        assert len(last["sampled"][name]) == rules.CHILDREN
    for name in ("typical", "threshold"):
        assert last["sampled"][name] >= last["sampled"]["coupled"]


def test_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    vocabulary.main(SMOKE)
    torch.set_num_threads(threads)
    last = last_line(capsys)
    assert last.keys() >= {"outside_share", "propose_ms", "exact_propose_ms", "first_proposal_accepted"}
    assert (
        last["walk_ms"].keys() == last["reference_ms"].keys() == {"greedy", "t", "top_p_peaked", "top_p_flat", "top_k"}
    )
    assert 0 < last["outside_share"] < 1
    assert min(last["propose_ms"], *last["walk_ms"].values()) > 0


@in_shared_loop
async def test_constrained(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    await constrained.main(SMOKE)
    torch.set_num_threads(threads)
    last = last_line(capsys)
    assert (last["valid"], last["differing"]) == (1.0, 0)
    assert min(last["ended"], last["resumed"]) > 0
    for key in ("neighbour_step_p99_ratio", "mask_ms_per_node"):
        assert last[key].keys() == {"8192", "151936"} and min(last[key].values()) > 0
    assert last["tokens_per_step_constrained_over_free"] > 0


@in_shared_loop
async def test_attack(capsys: pytest.CaptureFixture[str]) -> None:
    await attack.main(SMOKE)
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["attack"] for line in lines] == list(attack.SMOKE)
    for line in lines:
        assert line["neighbour_equal"] and line["neighbour_p99_ratio"] > 0
        assert "error" not in line["measured"]
    assert last.keys() == {"attacks", "held", "neighbour_differing", "neighbour_p99_ratio", "by_attack"}
    assert list(last["by_attack"]) == list(attack.SMOKE)
    assert all(each["measured"] for each in last["by_attack"].values())
    assert (last["attacks"], last["neighbour_differing"]) == (len(attack.SMOKE), 0)


def test_exact(capsys: pytest.CaptureFixture[str]) -> None:
    exact.main(SMOKE)
    last = last_line(capsys)
    assert last["differing_bits"] == {"float32": 0, "bfloat16": 0}
    assert last["control_differing"] > 0
    assert last["step_time_ratio"].keys() == {"float32", "bfloat16"}


def test_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    fleet.main(SMOKE)
    last = last_line(capsys)
    assert tuple(last) == fleet.KEYS
    assert 0 < last["vs_optimum"] <= 1.001


def test_footprint(capsys: pytest.CaptureFixture[str]) -> None:
    footprint.main(SMOKE)
    found = last_line(capsys)
    assert found["lost"] == 0
    for name in ("redis_commands", "redis_us", "coordinator_us"):
        assert set(found[name]) == {"open", "report", "close"}
    assert found["redis_commands"]["report"] > found["redis_commands"]["open"] > 1
    assert found["redis_bytes"]["session"] > 100
    assert found["rpc_bytes"]["report"][0] > 100 * footprint.SESSIONS
    # Padded messages have 128 bytes at least, whatever they hold.
    assert all(bytes_["down"] >= 128 * found["commits"][name] for name, bytes_ in found["link_bytes"].items())
    assert found["log_bytes"] > 0


def test_counters(capsys: pytest.CaptureFixture[str]) -> None:
    counters.main(SMOKE)
    last = last_line(capsys)
    assert last.keys() == {"step_us", "message_us", "snapshot_us", "scrape_us", "store_us"}
    assert min(last.values()) > 0


def test_capacity_gpu_measures_a_tiny_target_on_the_cpu_if_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    capacity_gpu.main(SMOKE)
    gpu = last_line(capsys)["gpu"]
    for ratio in ("vs_autoregression", "vs_server_draft", "server_draft_bound"):
        assert list(gpu[ratio]) == ["2"]
        assert gpu[ratio]["2"] > 0


def test_engine_gpu_measures_a_tiny_target_on_the_cpu_if_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    engine_gpu.main(SMOKE)
    gpu = last_line(capsys)["gpu"]
    assert gpu["rows"].keys() == {"graphs", "plain", "compiled"}
    assert all(list(by_rows) == ["1", "16"] and min(by_rows.values()) > 0 for by_rows in gpu["rows"].values())
    assert gpu["steps"].keys() == {f"{kind}, {what}" for kind in ("greedy", "sampled") for what in ("plain", "trees")}
    for whole, forward, outside in (parts for by_sessions in gpu["steps"].values() for parts in by_sessions.values()):
        assert 0 < forward < whole
        assert outside > 0
    assert set(gpu["hf"]["2"]) == {"engine", "hf dynamic", "hf static", "engine_vs_best_hf"}
    assert min(gpu["hf"]["2"].values()) > 0
    assert gpu["attention"]["2 x 16"].keys() == {"sdpa", "GB/s"}
