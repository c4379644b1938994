"""Provide the tools that lint and render docker/: skipped here if one is missing, required in CI."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from container_files import CHART
from demanded import demand, missing

Chart = Callable[[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def tool() -> Callable[..., str]:
    """Return a function that runs a linter and returns its output; it fails if the linter finds something."""

    def run(name: str, *arguments: str) -> str:
        path = Path(sys.executable).with_name(name)
        if not path.exists():
            missing(f"{name} is not installed: pip install -e '.[dev]'")
        done = subprocess.run([str(path), *arguments], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def helm() -> Any:
    """Return the bindings to Helm's own library."""
    demand("helm_python", "the chart")
    import helm_python

    return helm_python


@pytest.fixture(scope="session")
def chart(helm: Any) -> Chart:
    """Return a function that renders the chart into objects, as release `prod` in namespace `llm`."""

    def render(values: dict[str, Any]) -> list[dict[str, Any]]:
        with helm.Chart.load(str(CHART)) as loaded:
            files = loaded.render(values, name="prod", namespace="llm")
        texts = [text for name, text in files.items() if name.endswith(".yaml")]
        return [found for text in texts for found in yaml.safe_load_all(text) if found is not None]

    return render
