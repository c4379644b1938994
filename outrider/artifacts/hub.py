"""Fetch targets and drafts from the Hugging Face hub into the hub's own cache, with the package huggingface_hub.

An id is `org/name`, `org/name@revision`, or for a GGUF file `org/name:file.gguf` or `org/name@revision:file.gguf`. The
package's variables hold: HF_TOKEN, HF_HOME and HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from outrider.artifacts.model_files import parts
from outrider.core.errors import ModelRefused, Unavailable
from outrider.core.text import clean

log = logging.getLogger(__name__)

Tell = Callable[[str], None]
"""Called with a line for people."""

MAIN = "main"
ANSWER_TIMEOUT_S = 10.0
"""Seconds that the hub may take to say what a repository holds."""
_WANTED = ("*.json", "*.jinja", "*.safetensors")
"""What a target consists of: never code, and no weights that are pickled."""
_TEMPLATES = "additional_chat_templates"
"""The one folder of a repository that is fetched."""
_UNWANTED = (*(f"{_TEMPLATES[:i]}[!{letter}]*/*" for i, letter in enumerate(_TEMPLATES)), "consolidated*")
"""Other formats in folders of their own, whose names begin differently, and Mistral's second copy of the weights."""
_ID = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^@:\s]+))?(:(?P<file>[^@:\s]+))?", re.ASCII
)  # nothing that begins with a slash, a dot or ~


def hub_id(given: str | Path) -> tuple[str, str, str] | None:
    """Return repository, revision and file ("" if none is named) of an id; None for what is, or must be, a path.

    Whatever exists here is a path, and so are `org/name.gguf`, which names no file in a repository, and what leads out
    of one by `..`.
    """
    found = _ID.fullmatch(str(given))
    if found is None or os.path.lexists(given) or (found["repo"].endswith(".gguf") and not found["file"]):
        return None
    if ".." in (found["file"] or "").split("/"):
        return None
    return found["repo"], found["revision"] or MAIN, found["file"] or ""


def fetch_target(given: str | Path, name: str = "--model", *, tell: Tell = log.info) -> Path:
    """Return the folder of a target: `given` itself if it is a path, else where the files of that id are.

    name: what named the target, for messages. Raises ModelRefused, or Unavailable if the hub is and may come back.
    """
    if (found := hub_id(given)) is None:
        return Path(given)
    repo, revision, file = found
    where = f"{name} {given}"
    if file:
        raise ModelRefused(f"{where}: a target is a whole repository; leave out :{file}")
    with _refusals(where):
        from huggingface_hub import snapshot_download

        tell(f"taking {given} from the Hugging Face hub or its cache")
        folder = Path(
            snapshot_download(repo, revision=revision, allow_patterns=[*_WANTED], ignore_patterns=[*_UNWANTED])
        )
    tell(f"{given} is commit {folder.name}, in {folder}")
    return folder


def fetch_draft(given: str | Path, name: str = "--draft", *, tell: Tell = log.info) -> Path:
    """Return a GGUF file: `given` itself if it is a path, else where the file of that id is.

    The id of a repository with one GGUF file needs no `:file`. Raises what `fetch_target` does.
    """
    if (found := hub_id(given)) is None:
        return Path(given)
    repo, revision, file = found
    where = f"{name} {given}"
    if file and not file.endswith(".gguf"):
        raise ModelRefused(f"{where}: a draft is a GGUF file, whose name ends in .gguf, got {file}")
    with _refusals(where):
        from huggingface_hub import hf_hub_download

        tell(f"taking {given} from the Hugging Face hub or its cache")
        split = parts(file or _only_gguf(where, repo, revision))
        path, *_ = [Path(hf_hub_download(repo, part, revision=revision)) for part in split]
    tell(f"{given} is {path}")
    return path


def _only_gguf(where: str, repo: str, revision: str) -> str:
    """Return the name of the repository's one GGUF file. Raises ModelRefused if it has none, or several."""
    from huggingface_hub import HfApi

    files = HfApi().model_info(repo, revision=revision, timeout=ANSWER_TIMEOUT_S).siblings or ()
    drafts = sorted({parts(file.rfilename)[0] for file in files if file.rfilename.endswith(".gguf")})
    if len(drafts) != 1:
        listed = ", ".join(f":{draft}" for draft in drafts)
        why = f"several GGUF files; add one of them: {listed}" if drafts else "no *.gguf"
        raise ModelRefused(f"{where}: the repository has {why}")
    return drafts[0]


@contextlib.contextmanager
def _refusals(where: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence; `where` begins it."""
    try:
        from huggingface_hub import constants, errors
    except ImportError as error:
        why = "no such path here, and ids of the hub need: pip install huggingface_hub"
        raise ImportError(f"{where}: {why}") from error
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # its lines hold signed addresses
    try:
        yield
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise (ModelRefused if constants.is_offline_mode() else Unavailable)(_sentence(where, error)) from error
    except errors.HfHubHTTPError as error:
        raise (ModelRefused if error.response.status_code < 500 else Unavailable)(_sentence(where, error)) from error
    except (errors.HTTPError, errors.XetDownloadError, ConnectionError, TimeoutError) as error:  # type: ignore[attr-defined]
        raise Unavailable(_sentence(where, error)) from error
    except (errors.HFValidationError, OSError) as error:
        raise ModelRefused(f"{_sentence(where, error)} (the cache is {constants.HF_HUB_CACHE})") from error


def _sentence(where: str, error: Exception) -> str:
    """Return what the library says of an error, without the status line that comes before, and what caused it."""
    said = " ".join(str(error).split("\n\n")[-1].split()) or type(error).__name__
    cause = f" ({type(error.__cause__).__name__})" if error.__cause__ is not None else ""
    return f"{where}: no such path here, and the Hugging Face hub: {clean(said)}{cause}"
