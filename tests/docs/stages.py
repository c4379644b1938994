"""Set up what a page assumes beside its own commands, and replace names that are a reader's own."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import paced_verifier
from pages import ROOT, Step, blocks, steps
from terminal import COMMAND_S, CommandResult, Endless, Terminal

from outrider.wire.manifest import Manifest, sign
from outrider.wire.ticket import Signer

_ANOTHER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tiny_gguf import write_tiny_llama
write_tiny_llama(Path(sys.argv[2]))
"""
_TALKING = """
import asyncio
from edge_agent import AsyncClient

async def talk(client):
    await client.generate("class Queue:", max_tokens=1900, ignore_eos=True, temperature=0.8, traffic_class="code")

async def main():
    where = {"coordinator": "127.0.0.1:7700"}
    async with AsyncClient(**where) as one, AsyncClient(**where, draft=None) as two:
        await asyncio.gather(talk(one), talk(one), talk(two), return_exceptions=True)

asyncio.run(main())
"""


class Stage:
    """Provide nothing but the terminal. Use it as a context manager."""

    replaced: Mapping[str, str] = {}
    """Texts of the page -> the replacement that is typed; {folder} is the reader's."""
    fails: Mapping[str, int] = {}
    """Texts in commands -> the exit status that the page gives for them."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def real(self, command: str) -> str:
        """Return the command as it is typed here."""
        for text, instead in self.replaced.items():
            command = command.replace(text, instead.format(folder=self.terminal.folder))
        return command

    def status(self, step: Step) -> int:
        """Return the exit status that the command should have."""
        return next((code for part, code in self.fails.items() if part in step.command), 0)

    def must(self, command: str) -> CommandResult:
        """Run a command that the page assumes; fail unless it succeeds."""
        result = self.terminal.type(command)
        assert result is not None
        assert result.code == 0, result
        return result


class Quickstart(Stage):
    """Provide a draft that does not fit."""

    fails: Mapping[str, int] = {"another.gguf": 2}

    def __enter__(self) -> Stage:
        another = str(self.terminal.folder / "path/to/another.gguf")
        self.must(f"python -c '{_ANOTHER}' {ROOT / 'tests' / 'llama'} {another}")
        return self


class Elsewhere(Stage):
    """Put servers' folders into the reader's, replace named machines by this one, and Redis by the embedded one."""

    replaced: Mapping[str, str] = {
        "/srv/": "{folder}/srv/",
        "/var/lib/outrider/": "{folder}/var/",
        "DNS:coordinator.example,DNS:verifier-1.example": "IP:127.0.0.1",
        "coordinator.example": "127.0.0.1",
        "verifier-1.example": "127.0.0.1",
        "redis://redis:6379": "embedded",
    }


class Distilling(Stage):
    """Put the loop's settings into the environment, and give the publisher a key."""

    def __enter__(self) -> Stage:
        folder = self.terminal.folder
        self.terminal.environment.update(
            OUTRIDER_DISTILL_TRAFFIC=str(folder / "traffic"),
            OUTRIDER_DISTILL_TARGET="path/to/target",
            OUTRIDER_DISTILL_DRAFT="path/to/draft.gguf",
            OUTRIDER_DISTILL_ARTIFACTS=str(folder / "srv/artifacts"),
        )
        self.must("outrider-distill key > publisher.hex")
        return self


class Releasing(Elsewhere):
    """Replace HASH by a release; publish others before the commands that need them."""

    replaced: Mapping[str, str] = {**Elsewhere.replaced, "publisher.pem": "{folder}/publisher.pem"}

    def __enter__(self) -> Stage:
        self._signer = Signer.generate()
        key = self.terminal.folder / "publisher.pem"
        key.touch(mode=0o600)
        key.write_bytes(self._signer.pem())
        (self.terminal.folder / "srv" / "artifacts").mkdir(parents=True)
        self._version = 0
        self._hash = ""
        return self

    def real(self, command: str) -> str:
        if command.startswith("outrider releases") and not self._hash:
            self._hash = self._published()
        if command.startswith("outrider releases rollback"):
            self._hash = self._published()
            if "--key" in command:
                self.must(f"outrider releases promote {self._hash}")
        # What is published once more is published already: it changes nothing.
        command = command.replace("FILE", f"manifest-{self._version}")
        return super().real(command.replace("HASH", self._hash[:12]))

    def _published(self) -> str:
        """Publish another draft, which goes on trial, and return its hash. Its bytes do not matter."""
        self._version += 1
        data = b"draft %d" % self._version
        digest = hashlib.sha256(data).hexdigest()
        manifest = Manifest(
            version=self._version,
            weights_hash="sha256:" + 64 * "1",
            tokenizer_hash="sha256:" + 64 * "2",
            artifact=f"sha256:{digest}",
            size=len(data),
            quantization="Q8_0",
        )
        (self.terminal.folder / "srv" / "artifacts" / f"{digest}.gguf").write_bytes(data)
        (self.terminal.folder / f"manifest-{self._version}").write_bytes(sign(manifest, self._signer))
        self.must(f"outrider releases publish manifest-{self._version}")
        return digest


class Configuring(Stage):
    """Provide the files that the page shows, as `outrider.toml` or by the name with which it prints them."""

    fails: Mapping[str, int] = {"check wrong.toml": 2}

    def __enter__(self) -> Stage:
        for block in blocks("docs/configuration.md"):
            if block.language == "toml":
                (self.terminal.folder / "outrider.toml").write_text(block.text)
            elif block.language == "console":
                self._write(*steps(block))
        return self

    def _write(self, *shown: Step) -> None:
        for step in shown:
            if found := re.fullmatch(r"cat (\S+)", step.command):
                (self.terminal.folder / found[1]).write_text(f"{step.shown}\n")


class Administering(Stage):
    """Run three sessions, whose ids replace the page's."""

    _ID = re.compile(r"\b[0-9a-f]{32}\b")

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        terminal.environment.update(paced_verifier.environment(200.0))  # slow enough to last for the page
        _pace_verifiers(terminal.folder / ".bin" / "outrider")
        terminal.environment["OUTRIDER_EDGE_CPU_SHARE"] = "0.1"
        self._ids: dict[str, str] = {}
        self._live: list[str] = []
        self._talk: Endless | None = None

    def real(self, command: str) -> str:
        if command.startswith("outrider ") and " up " not in command and self._talk is None:
            self._talk = self.terminal.begin_python(_TALKING)
            self._live = self._sessions(self._talk)
        for known in self._ID.findall(command):
            self._ids.setdefault(known, self._live[len(self._ids)])
        return self._ID.sub(lambda found: self._ids[found[0]], command)

    def _sessions(self, talk: Endless) -> list[str]:
        """Return the sessions once all three are live and their windows are decided."""
        end = time.monotonic() + COMMAND_S
        while time.monotonic() < end:
            talk.check()
            listed = json.loads(self.must("outrider sessions list -o json").out)["sessions"]
            decided = "too little is known" not in self.must("outrider window show").out
            if decided and sum(session["state"] == "live" for session in listed) == 3:
                return [session["id"] for session in listed]
            time.sleep(0.5)
        raise AssertionError("the sessions of the page did not begin")


def _pace_verifiers(command: Path) -> None:
    """Have the command start verifiers that are paced."""
    script = command.read_text().splitlines()
    seam = ["from coordinator.cluster import Cluster", f"Cluster.verifier_module = {paced_verifier.NAME!r}"]
    command.write_text("\n".join([script[0], *seam, *script[1:], ""]))


STAGES: Mapping[str, Callable[[Terminal], Stage]] = {
    "docs/quickstart.md": Quickstart,
    "docs/operations.md": Elsewhere,
    "docs/traffic.md": Elsewhere,
    "docs/distillation.md": Elsewhere,
    "docs/metrics.md": Distilling,
    "docs/releases.md": Releasing,
    "docs/admin.md": Administering,
    "docs/configuration.md": Configuring,
}
