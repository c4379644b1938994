"""Write what is shipped: the target, its heads, and both drafts as Q8_0 GGUF, checked against their sources."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from cloud_verifier.distill.gguf.writer import check_types, write_gguf
from models.recipe.settings import Job
from models.recipe.target import load_model
from outrider.llama.model import quantize

DRAFTS = {"draft": "draft.gguf", "draft-narrow": "draft-narrow.gguf"}
HEADS = "heads.safetensors"
_MAX_FILE = 15_000_000
_MAX_TOTAL = 50_000_000


def build(job: Job) -> None:
    """Write ``export/target``, the drafts ``export/*.gguf`` and ``export/heads.safetensors``."""
    folder = job.stage("export")
    _replace_tree(job.stage("target") / "model", folder / "target")
    for stage, name in DRAFTS.items():
        export_draft(job.stage(stage) / "model", folder / name)
    shutil.copy2(job.stage("heads") / job.scale.heads.kind / "model" / HEADS, folder / HEADS)
    sizes = sizes_of(folder)
    (folder / "done.json").write_text(json.dumps({"bytes": sizes}, indent=1), encoding="utf-8")


def export_draft(model_folder: Path, path: Path) -> None:
    """Write one draft as Q8_0, and check that no tensor silently fell back to a wider type."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    full = path.with_suffix(".f32")
    write_gguf(load_model(model_folder), tokenizer, full, name=f"outrider-demo-{path.stem}")
    quantize(full, path, "Q8_0")
    check_types(path, "Q8_0")
    full.unlink()


def sizes_of(folder: Path) -> dict[str, int]:
    """Return the bytes of every file that ships."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "done.json"
    }


def check_sizes(folder: Path) -> None:
    """Raise ValueError if any file that ships, or all, have too many bytes."""
    sizes = sizes_of(folder)
    for name, size in sizes.items():
        if size > _MAX_FILE:
            raise ValueError(f"{name} has {size} bytes; files above {_MAX_FILE} are not committed")
    if sum(sizes.values()) > _MAX_TOTAL:
        raise ValueError(f"the models have {sum(sizes.values())} bytes together; at most {_MAX_TOTAL} are committed")


def publish(work: Path, destination: Path) -> None:
    """Put what ``build`` wrote, and the model card, in the place of the repository's ``models/``.

    Raises ValueError for a pair that must not ship: too large, or a target that a 5-gram model beats.
    """
    export = work / "export"
    check_sizes(export)
    check_learnt(json.loads((work / "evaluate" / "results.json").read_text(encoding="utf-8"))["bits_per_byte"])
    _replace_tree(export / "target", destination / "target")
    for name in (*DRAFTS.values(), HEADS):
        shutil.copy2(export / name, destination / name)
    shutil.copy2(work / "evaluate" / "README.md", destination / "README.md")
    for path in [*(destination / "target").iterdir(), *destination.glob("*.gguf"), destination / HEADS]:
        path.chmod(0o644)  # safetensors writes files that only their owner may read


def check_learnt(bits_per_byte: dict[str, dict[str, float]]) -> None:
    """Raise ValueError where the target predicts a class of held-out text worse than the 5-gram model."""
    counted = bits_per_byte["5-gram"]
    for label, bits in bits_per_byte["target"].items():
        if not bits < counted[label]:
            raise ValueError(
                f"the target needs {bits:.3f} bits per byte on {label}, a 5-gram model {counted[label]:.3f}: train on"
            )


def _replace_tree(source: Path, destination: Path) -> None:
    """A file left from before, such as a model of one shard beside one of three, would be loaded instead."""
    shutil.rmtree(destination, ignore_errors=True)
    shutil.copytree(source, destination)
