"""Test that the generated pages of docs/reference are fresh, and that the example of docs/configuration.md is right."""

from __future__ import annotations

import json
import re
from pathlib import Path

from processes import PROCESSES, run

from tools import reference

TEXT = (reference.FOLDER.parent / "configuration.md").read_text()
[EXAMPLE] = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
SECRETS = {"OUTRIDER_COORDINATOR_ADMIN_TOKEN": "an admin token", "OUTRIDER_COORDINATOR_JOIN_TOKEN": "a join token"}


def test_the_pages_are_those_of_the_code(monkeypatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, text in reference.pages().items():
        assert (reference.FOLDER / name).read_text() == text, "run `make reference`"


def test_the_example_is_right(tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(EXAMPLE)
    ran = run("coordinator.cli", "config", "check", str(file), "-o", "json", **SECRETS)
    assert (ran.returncode, ran.stderr) == (0, "")
    processes = json.loads(ran.stdout)["processes"]
    assert [process["missing"] for process in processes] == [[]] * len(PROCESSES)


def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text(re.findall(r"```\n\$ cat wrong.toml\n(.*?)\$ ", TEXT, re.DOTALL)[0])
    ran = run("coordinator.cli", "config", "check", str(tmp_path / "wrong.toml"))
    assert ran.returncode == 2
    for line in ran.stderr.replace(f"{tmp_path}/", "").splitlines():
        assert line in TEXT
