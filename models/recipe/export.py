"""What ships: the target's directory, and both drafts as Q8_0 GGUF, checked against what they came from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from cloud_verifier.distill.gguf_export import check_types, export_gguf
from models.recipe.settings import Job
from models.recipe.target import load_model
from outrider.llama.quantize import quantize

DRAFTS = {"draft": "draft.gguf", "draft-narrow": "draft-narrow.gguf"}
_MAX_FILE = 15_000_000
_MAX_TOTAL = 50_000_000


def build(job: Job) -> None:
    """Write ``export/target``, ``export/draft.gguf`` and ``export/draft-narrow.gguf``."""
    folder = job.stage("export")
    shutil.copytree(job.stage("target") / "model", folder / "target", dirs_exist_ok=True)
    for stage, name in DRAFTS.items():
        export_draft(job.stage(stage) / "model", folder / name)
    sizes = check_sizes(folder)
    (folder / "done.json").write_text(json.dumps({"bytes": sizes}, indent=1), encoding="utf-8")


def export_draft(model_folder: Path, path: Path) -> None:
    """Write one draft as Q8_0, and check that no tensor silently fell back to a wider type."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    full = path.with_suffix(".f32")
    export_gguf(load_model(model_folder), tokenizer, full, name=f"outrider-demo-{path.stem}")
    quantize(full, path, "Q8_0")
    check_types(path, "Q8_0")
    full.unlink()


def check_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every file that ships; raise ValueError if any or all are too many."""
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "done.json"
    }
    for name, size in sizes.items():
        if size > _MAX_FILE:
            raise ValueError(f"{name} has {size} bytes; files above {_MAX_FILE} are not committed")
    if sum(sizes.values()) > _MAX_TOTAL:
        raise ValueError(f"the models have {sum(sizes.values())} bytes together; at most {_MAX_TOTAL} are committed")
    return sizes


def publish(work: Path, destination: Path) -> None:
    """Copy what ``build`` wrote, and the model card, into the repository's ``models/``."""
    export = work / "export"
    shutil.copytree(export / "target", destination / "target", dirs_exist_ok=True)
    for name in DRAFTS.values():
        shutil.copy2(export / name, destination / name)
    shutil.copy2(work / "evaluate" / "README.md", destination / "README.md")
    for path in destination.rglob("*"):  # safetensors writes files that only their owner may read
        if path.is_file():
            path.chmod(0o644)
