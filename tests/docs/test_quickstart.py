"""Test that commands of the quickstart and Python of several pages do what the pages say, on the shared cluster."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
from pages import ROOT, blocks
from shared_cluster import Cluster, environment

PAGE = "docs/quickstart.md"


def test_the_commands_of_the_quickstart_give_a_text_and_show_the_cluster(cluster: Cluster, url: str) -> None:
    """Installing, `up` and `serve` are what the shared cluster and its server were started by, with other ports."""
    install, up, serve, ask, look, two, kill = blocks(PAGE, "sh")
    assert "tools/install.py" in install
    assert shlex.split(up)[:2] == ["outrider", "up"] and shlex.split(serve)[:2] == ["outrider-edge", "serve"]
    variables = environment(cluster.folder) | {"OUTRIDER_ADMIN_COORDINATOR": cluster.address}
    variables["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{variables['PATH']}"

    def run(*command: str) -> str:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert '"text":' in run("bash", "-c", ask.replace("http://127.0.0.1:8080", url))
    [python] = blocks(PAGE, "python")
    assert "accepted" in run(sys.executable, "-c", python.replace("http://127.0.0.1:8080", url))
    assert "verifier-1" in run("bash", "-c", look)
    assert shlex.split(two)[:4] == ["outrider", "up", "--verifiers", "2"]
    look, find = kill.splitlines()[0], kill.splitlines()[1].replace("kill -9", "echo")
    assert run("bash", "-c", f"{look}; {find}").splitlines()[-1].isdecimal()


def test_the_python_of_the_readme_answers(cluster: Cluster) -> None:
    [python] = blocks("README.md", "python")
    assert run([sys.executable, "-c", python.replace("127.0.0.1:7700", cluster.address)], cluster).strip()


@pytest.mark.parametrize("page", ["docs/sdk.md", "docs/errors.md"])
def test_the_python_of_a_page_about_the_sdk_runs(page: str, cluster: Cluster) -> None:
    for python in blocks(page, "python"):
        if "10.0.0.5" in python:  # it names certificates
            continue
        program = re.sub(r'coordinator="[^"]*"(, tls=ClientTls\(\), api_key="KEY")?', "", python).replace("(, ", "(")
        run([sys.executable, "-c", program], cluster)


def test_the_desktop_app_of_the_recipes_answers(cluster: Cluster) -> None:
    assert run([sys.executable, "-m", "examples.desktop_chat", "What is gravity?"], cluster).strip()


def run(command: list[str], cluster: Cluster) -> str:
    variables = environment(cluster.folder) | {"OUTRIDER_EDGE_COORDINATOR": cluster.address}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout
