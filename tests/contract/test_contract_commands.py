"""Test that every command does once what its help says, and says what is wrong where it cannot."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import httpx
import pytest
from publishing import Publisher
from shared_cluster import NAME, Cluster, command, running, until
from small_pair import DRAFT, TARGET

from edge_agent import Client

PROMPT = "def double(x):\n"
COMMANDS = ("outrider", "outrider-coordinator", "outrider-verifier", "outrider-edge", "outrider-distill")


EXPLAINED = r"""
import contextlib, io, re, runpy, sys
script, waiting = sys.argv[1], [[]]
while waiting:
    words, out, code = waiting.pop(), io.StringIO(), None
    sys.argv = [script, *words, "--help"]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    assert code == 0 and out.getvalue().lower().startswith("usage:"), words
    if below := re.search(r"^  (?:COMMAND|VERB)\n((?:    .*\n)+)", out.getvalue(), re.MULTILINE):
        waiting += [[*words, found] for found in re.findall(r"^    (\w\S*)", below[1], re.MULTILINE)]
    print(*words)
"""
"""Runs an installed command for the help of everything below it, in one process: a start takes longer than a help."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_all_below_it_explain_themselves(cluster: Cluster, name: str) -> None:
    code, out, err = cluster.run(name, "--help")
    assert (code, err) == (0, "") and out.lower().startswith("usage:")
    several = "\n  COMMAND\n" in out
    code, out, err = cluster.run("python", "-c", EXPLAINED, *command(name))
    assert (code, err) == (0, "") and (len(out.splitlines()) > 1) is several, err
    code, _, err = cluster.run(name, "--no-such-flag")
    assert code == 2 and err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ("--version", r"\d+\.\d+"),
        ("status", r"verifier-1 .* serving"),
        ("top --once", "verifier-2"),
        ("verifiers list", r"verifier-2 .* serving"),
        ("verifiers show verifier-1", r"state +serving"),
        ("sessions list", ""),
        ("window show", ""),
        ("releases list", ""),
        ("tenants list", "acme"),
    ],
)
def test_an_operator_sees_the_cluster(cluster: Cluster, words: str, pattern: str) -> None:
    assert re.search(pattern, cluster.outrider(*words.split()))
    if "--" not in words:
        out = cluster.outrider(*words.split(), "-o", "json")
        assert json.loads(out) and "\n" in out


def test_an_operator_sees_a_session_and_steers_how_far_it_speculates(cluster: Cluster, client: Client) -> None:
    asked = {"max_tokens": 4000, "ignore_eos": True, "temperature": 1.2, "seed": 7}
    with client.stream(PROMPT, **asked) as stream:
        assert stream.next()
        session = stream.statistics.session_id
        cluster.outrider("window", "pin", session, "--k", 0, "--depth", 0)  # from here on it is slow
        until(lambda: session in cluster.outrider("sessions", "list"))
        assert session in cluster.outrider("sessions", "show", session)
        until(lambda: "pinned" in cluster.outrider("window", "show", session))

        def evaluated() -> int:
            """Return how many draft tokens were evaluated while twenty chunks came."""
            before = stream.statistics.evaluated
            assert all(stream.next() for _ in range(20))
            return stream.statistics.evaluated - before

        until(lambda: evaluated() < 10)  # a few are taken all the same, to see how many would be accepted
        cluster.outrider("window", "set", session, "--k", 2, "--depth", 4)
        cluster.outrider("window", "lift", session)
    cluster.outrider("window", "set", "--all", "--k", 2, "--depth", 8)
    cluster.outrider("window", "lift", "--all")
    code, _, err = cluster.run(
        "outrider", "window", "set", "--all", "--k", 9, "--depth", 2, "--coordinator", cluster.address
    )
    assert code == 2 and re.search(r"9.*at most.*2", err)


def test_an_operator_keeps_sessions_off_a_verifier_and_lets_them_back(cluster: Cluster, client: Client) -> None:
    [kept, other] = cluster.asked("verifiers", "list")["verifiers"]
    cluster.outrider("verifiers", "cordon", kept["id"])
    try:
        assert cluster.asked("verifiers", "show", kept["id"])["state"] == "cordoned"
        for _ in range(4):
            assert client.generate(PROMPT, max_tokens=4).statistics.address == other["address"]
    finally:
        cluster.outrider("verifiers", "uncordon", kept["id"])
    assert cluster.asked("verifiers", "show", kept["id"])["state"] == "serving"
    code, _, err = cluster.run("outrider", "verifiers", "show", "nobody", "--coordinator", cluster.address)
    assert code == 3 and "nobody" in err


def test_an_operator_makes_limits_and_revokes_a_tenant(cluster: Cluster) -> None:
    key = cluster.outrider("tenants", "create", "temporary", "--max-places", 2).strip()
    assert key not in cluster.outrider("tenants", "list", "-o", "json")
    cluster.outrider("tenants", "set", "temporary", "--opens-per-minute", 5)
    [found] = [one for one in cluster.asked("tenants", "list")["tenants"] if one["name"] == "temporary"]
    assert (found["limits"]["max_places"], found["limits"]["opens_per_minute"]) == (2, 5)
    cluster.outrider("tenants", "revoke", "temporary")


def test_a_publisher_publishes_pins_and_takes_back_a_draft(cluster: Cluster, tmp_path: Path) -> None:
    publisher = Publisher(cluster, tmp_path)
    assert re.fullmatch("[0-9a-f]{64}", publisher.public_key)
    assert publisher.public_key in publisher.run("key", "--file", publisher.variables["OUTRIDER_DISTILL_KEY"])
    release = publisher.publish(DRAFT)
    for verb in ("show", "pin", "unpin", "rollback"):
        cluster.outrider("releases", verb, release[:12])
    assert release[:12] in publisher.run("status")


@pytest.mark.parametrize("command", ["run", "once"])
def test_the_distillation_loop_waits_for_traffic_and_ends_when_told_to(
    cluster: Cluster, tmp_path: Path, command: str
) -> None:
    publisher = Publisher(cluster, tmp_path)
    if command == "once":
        publisher.run("once", OUTRIDER_DISTILL_FRESH_TOKENS="1000000000")
        return
    variables = publisher.variables | {"OUTRIDER_DISTILL_FRESH_TOKENS": "1000000000"}
    with running(tmp_path, "the loop continues", "outrider-distill", "run", home=cluster.folder, **variables) as loop:
        loop.process.send_signal(signal.SIGTERM)
        assert loop.process.wait(120) in (0, 128 + signal.SIGTERM)


def test_texts_and_chats_come_from_the_terminal_with_a_draft_and_without(cluster: Cluster, client: Client) -> None:
    where = ("--coordinator", cluster.address, "--target", NAME, "--max-tokens", 24)
    expected = client.generate(PROMPT, max_tokens=24)
    for draft in ("auto", "ngram", "none"):
        code, out, err = cluster.run("outrider-edge", "generate", PROMPT, *where, "--draft", draft, "--stats")
        assert (code, out) == (0, f"{expected.text}\n") and f"{len(expected.token_ids)} tokens" in err
    said = client.chat([{"role": "user", "content": "Hello"}], max_tokens=24).text
    for name in ("outrider", "outrider-edge"):
        code, out, _ = cluster.run(name, "chat", *where, "--message", "Hello")
        assert (code, out.strip()) == (0, said.strip())


def test_a_cluster_is_measured_with_drafts_and_without(cluster: Cluster, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"id": "1", "category": "code", "turns": ["Write a function.", "And a class."]}\n'
        '{"id": "2", "category": "sums", "turns": ["What is 6 times 7?"]}\n'
    )
    given = ("--coordinator", cluster.address, "--model", NAME, "--prompts", prompts, "--concurrency", "1,2")
    written = tmp_path / "bench.json"
    options = ("--rtt-ms", 5, "--max-tokens", 16, "--json", written)
    code, out, err = cluster.run("outrider", "bench", *given, *options, timeout_s=120)
    assert code == 0, err
    assert "IDENTICAL" in out and "100%" in err
    found = json.loads(written.read_text())
    assert [(row["users"], row["drafts"], row["texts"]) for row in found["rows"]] == [
        *((users, drafts, 3) for users in (1, 2) for drafts in (False, True))
    ]
    plain, fast = found["rows"][:2]
    assert plain["acceptance_length"] == 1.0 and plain["from_verifier"] == 0.0 and fast["differing"] == 0
    assert plain["first_token_ms"] >= 5.0 and found["whole"]
    assert {row["category"] for row in found["categories"]} == {"code", "sums"}
    code, _, err = cluster.run("outrider", "bench", *given, "--concurrency", 3)
    assert code == 2 and "3 users need as many prompts" in err


@pytest.mark.nightly("CI runs `outrider demo` itself")
def test_a_demonstration_shows_the_same_text_with_speculation_and_without(cluster: Cluster) -> None:
    code, out, err = cluster.run("outrider", "demo", "--model", TARGET, "--draft", DRAFT, timeout_s=600)
    assert code == 0, err
    assert (out.count("speed-up over no speculation"), out.count("identical: yes")) == (6, 7)
    assert "was killed (kill -9)" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "words", "code", "says"),
    [
        ("outrider", ("status", "--coordinator", "127.0.0.1:1"), 4, "127.0.0.1:1"),
        ("outrider-edge", ("generate", PROMPT, "--coordinator", "127.0.0.1:1"), 1, "127.0.0.1:1"),
        ("outrider-edge", ("generate", PROMPT, "--coordinator", "no port"), 2, "no port"),
        ("outrider-verifier", ("--model", "/no/such/model"), 2, "/no/such/model"),
        ("outrider-verifier", ("--model", TARGET, "--listen", "0.0.0.0:0"), 2, "--insecure"),
        ("outrider-verifier", ("--model", TARGET, "--threads", "0"), 2, "threads"),
        ("outrider-coordinator", ("--listen", "0.0.0.0:0"), 2, "--insecure"),
        ("outrider-coordinator", ("--tenants", "/no/such/file"), 2, "/no/such/file"),
        ("outrider-distill", ("once", "--traffic", "/tmp"), 2, "target"),
        (
            "outrider-distill",
            ("gate", "--candidate", DRAFT, "--incumbent", DRAFT, "--dataset", "/no/such/dataset"),
            2,
            "/no/such/dataset",
        ),
        ("outrider", ("up", "--model", TARGET, "--draft", "/no/such/draft.gguf"), 2, "/no/such/draft.gguf"),
    ],
)
def test_a_command_that_cannot_do_its_work_says_why(
    cluster: Cluster, name: str, words: tuple[str, ...], code: int, says: str
) -> None:
    got, out, err = cluster.run(name, *words)
    assert (got, out) == (code, "") and says in err and "Traceback" not in err


def test_a_wrong_or_missing_admin_token_is_refused(cluster: Cluster) -> None:
    for token in ("", "wrong-token-0123456789"):
        code, out, err = cluster.run("outrider", "status", "--coordinator", cluster.address, OUTRIDER_ADMIN_TOKEN=token)
        assert (code, out) == (5, "") and "token" in err


def test_settings_are_checked_before_anything_starts(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text("[edge]\nmax_sessions = 3\n")
    code, out, err = cluster.run("outrider", "config", "check", file)
    assert code == 0 and "max_sessions" in out, err
    file.write_text("[edge]\nno_such_setting = 1\n")
    for words in (("outrider", "config", "check", file), ("outrider-edge", "generate", PROMPT, "--config", file)):
        code, out, err = cluster.run(*words)
        assert code == 2 and "no_such_setting" in out + err and "Traceback" not in err


def test_metrics_count_what_was_served(cluster: Cluster, client: Client) -> None:
    def committed() -> float:
        found = dict(re.findall(r"^(\S+): .*metrics at (http://\S+)", cluster.up.output, re.MULTILINE))
        pages = [httpx.get(url, timeout=120).text for url in found.values()]
        assert len(pages) == 3  # of the coordinator and each verifier
        return sum(
            map(float, re.findall(r"^outrider_generation_tokens_total(?:\{.*\})? (\S+)$", "".join(pages), re.MULTILINE))
        )

    before = committed()
    client.generate(PROMPT, max_tokens=50, ignore_eos=True)
    until(lambda: committed() >= before + 50)
