"""List the commands of the pages that no test runs, each with its reason. An entry that fits no command fails."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import tomllib

from pages import PAGES, ROOT

ANY = ""
INSTALLS = "it installs packages, and a test changes no environment; the names of its extras are checked"
WHOLE = "it is, or holds, the tests themselves; its target is checked to be in the Makefile"
MEASURES = "it takes minutes to hours of quiet cores; the module is checked to be there"

BY_HAND: tuple[tuple[str, str, str], ...] = (
    (ANY, r"(\S+/)?pip install .*", INSTALLS),
    (ANY, r"python3 tools/install\.py .*", INSTALLS),
    (ANY, r"\. \.venv/bin/activate", INSTALLS),
    (ANY, r"(\S+/)?python -m cloud_verifier\.vllm_environment .*", INSTALLS),
    (ANY, r"outrider up --engine vllm .*", "it needs vLLM; make test-vllm runs such verifiers"),
    (
        ANY,
        r"outrider up --model Qwen/.*",
        "it needs the Hugging Face hub; tests/e2e has one of its own",
    ),
    (ANY, r"make (demo|test|check|lint|bench|install|proto|reference)\b.*", WHOLE),
    (ANY, r"(\S+/)?python -m benchmarks\b.*", MEASURES),
    (ANY, r"(docker|helm|kubectl|kind|minikube) .*", "it needs a container engine or a Kubernetes cluster"),
    ("models/README.md", r"python -m models\.recipe .*", "it trains for two hours"),
    *([] if shutil.which("jq") else [(ANY, r".*\| jq .*", "jq is not installed here")]),
    (
        "docs/distillation.md",
        r"outrider-distill store .*",
        "it needs a tenant's traffic; test_ngram_store_build.py runs it",
    ),
    ("docs/deploy.md", r"(mkdir packages|PYTHONPATH=\S+|outrider-verifier) .*", "it needs GPUs of two machines"),
    ("docs/deploy.md", r"(cp docker/\.env|set -a;|curl) .*", "it belongs to what `docker compose` starts"),
)
"""(page or ANY, pattern of the whole command, reason)"""


def reason(page: str, command: str) -> str | None:
    """Return why a test does not run the command; None if it is run."""
    return next((why for where, like, why in BY_HAND if where in (ANY, page) and _fits(like, command)), None)


def stale(commands: list[tuple[str, str]]) -> list[str]:
    """Return entries for a page that fit none of its commands. Those for any page may be unused on one."""
    return [
        like
        for where, like, _ in BY_HAND
        if where in PAGES and not any(where == page and _fits(like, command) for page, command in commands)
    ]


def wrong(command: str) -> str | None:
    """Return what can be seen to be wrong with a command without running it, or None."""
    bare = command.partition("#")[0]
    named = re.search(r"'?\.\[([\w,]+)\]'?", bare) or re.match(r"python3 tools/install\.py ([\w ]+)", bare)
    if named:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        return next((f"there is no extra {name}" for name in re.findall(r"\w+", named[1]) if name not in extras), None)
    if found := re.match(r"(?:\S+/)?python -m (\S+)", bare):
        return None if importlib.util.find_spec(found[1]) else f"there is no module {found[1]}"
    if bare.startswith("make "):
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((f"there is no target {word}" for word in shlex.split(bare)[1:] if word not in targets), None)
    return None


def _fits(like: str, command: str) -> bool:
    return re.fullmatch(like, command, re.DOTALL) is not None
