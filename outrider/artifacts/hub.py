"""Fetch targets and drafts from the Hugging Face hub into the hub's own cache, with the package huggingface_hub.

An id is `org/name`, `org/name@revision`, or for a GGUF file `org/name:file.gguf` or `org/name@revision:file.gguf`. The
package's variables hold: HF_TOKEN, HF_HOME and HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import logging
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.artifacts.model_files import INDEX, WEIGHTS, read_json
from outrider.core.errors import ModelRefused, Unavailable
from outrider.core.text import clean, counted

log = logging.getLogger(__name__)

Tell = Callable[[str], None]
"""Called with a line for people, from any thread."""

TELL_S = 5.0
"""Seconds between two lines about a download."""
ATTEMPTS = 3
"""How often a download that breaks off is tried; each goes on with the files that are not there yet."""
ANSWER_TIMEOUT_S = 10.0
"""Seconds that the hub may take to say what a repository holds."""
MAX_LISTED = 12
"""GGUF files that a message names, at most."""
MAIN = "main"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_SETTINGS = (
    *(CONFIG, TOKENIZER, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.*", "*processor_config.json", "*quant*_config.json", "quantize_config.json"),
)
"""What a target needs beside its weights, in the repository's uppermost folder; vLLM reads the last line."""
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

    Only settings, tokenizer, chat template and safetensors are fetched: never code, and no weights that are pickled.
    name: what named the target, for messages. Raises ModelRefused, or Unavailable if the hub is and may come back.
    """
    if (found := hub_id(given)) is None:
        return Path(given)
    repo, revision, file = found
    with _refusals(f"{name} {given}", repo, revision), _ended_at_once():
        if file:
            raise ModelRefused(f"a target is a whole repository; leave out :{file}")
        commit, sizes, absent = _look(repo, revision, tell)
        wanted = [
            path for path in sizes if any(fnmatch.fnmatchcase(path, one) for one in _SETTINGS) and "/" not in path
        ]
        weights = _weights(sizes)
        for needed, there in ((CONFIG, CONFIG in sizes), (TOKENIZER, TOKENIZER in sizes), ("*.safetensors", weights)):
            if not there:
                raise ModelRefused(_lacks(needed, absent))
        folder = _download(repo, revision, commit, {path: sizes[path] for path in [*wanted, *weights]}, tell, absent)
        if weights == [INDEX]:
            shards = _shards(folder, repo)
            if missing := [shard for shard in shards if shard not in sizes]:
                raise ModelRefused(f"its index names {missing[0]}; {_lacks('file of that name', absent)}")
            folder = _download(repo, folder.name, folder.name, {path: sizes[path] for path in shards}, tell, absent)
    tell(f"{given} is commit {folder.name}, in {folder}")
    return folder


def fetch_draft(given: str | Path, name: str = "--draft", *, tell: Tell = log.info) -> Path:
    """Return a GGUF file: `given` itself if it is a path, else where the file of that id is.

    The id of a repository with one GGUF file needs no `:file`. Raises what `fetch_target` does.
    """
    if (found := hub_id(given)) is None:
        return Path(given)
    repo, revision, file = found
    with _refusals(f"{name} {given}", repo, revision), _ended_at_once():
        if file and not file.endswith(".gguf"):
            raise ModelRefused(f"a draft is a GGUF file, whose name ends in .gguf, got {file}")
        commit, sizes, absent = _look(repo, revision, tell)
        drafts = sorted(path for path in sizes if path.endswith(".gguf"))
        if not file and len(drafts) > 1:
            raise ModelRefused(f"the repository has several GGUF files; add one of them: {_listed(drafts)}")
        chosen = file or next(iter(drafts), "")
        if chosen not in sizes:
            others = f"; of GGUF files it has {_listed(drafts)}" if drafts else ""
            raise ModelRefused(f"{_lacks(chosen or '*.gguf', absent)}{others}")
        folder = _download(repo, revision, commit, {chosen: sizes[chosen]}, tell, absent)
    tell(f"{given} is {chosen} of commit {folder.name}, in {folder}")
    return folder / chosen


def _lacks(file: str, absent: str) -> str:
    """Return the sentence about a file that is not there; `absent` says why the cache alone was asked."""
    return f"the cache has no {file} of it, and {absent}" if absent else f"the repository has no {file}"


def _listed(drafts: Sequence[str]) -> str:
    more = f" and {len(drafts) - MAX_LISTED} more" if len(drafts) > MAX_LISTED else ""
    return ", ".join(f":{draft}" for draft in drafts[:MAX_LISTED]) + more


def _weights(sizes: Mapping[str, int]) -> list[str]:
    """Return the files of the weights, or the index of them, which transformers would read."""
    for single in (WEIGHTS, INDEX):
        if single in sizes:
            return [single]
    return [path for path in sizes if path.endswith(".safetensors") and "/" not in path]


def _shards(folder: Path, repo: str) -> list[str]:
    """Return the files that the index in a folder names. Raises ModelRefused."""
    named = read_json(folder / INDEX, repo).get("weight_map")
    shards = sorted({str(shard) for shard in named.values()}) if isinstance(named, dict) else []
    if wrong := [shard for shard in shards if not shard.endswith(".safetensors")]:
        raise ModelRefused(f"its index names {wrong[0]}; only safetensors are fetched")
    return shards


# --- what the hub and its cache hold


def _look(repo: str, revision: str, tell: Tell) -> tuple[str, dict[str, int], str]:
    """Return the commit of a revision, its files with their bytes, and "".

    Where the hub is not to be reached, these are the files in the cache, whose bytes are 0, and the text says why.
    Raises Unavailable or ModelRefused if the cache has none, or what huggingface_hub raises.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    api = hub.HfApi()
    _limit_waits()
    for library in ("huggingface_hub", "httpx2"):  # their lines hold signed addresses
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=ANSWER_TIMEOUT_S)
        return info.sha or revision, {file.rfilename: file.size or 0 for file in info.siblings or ()}, ""
    except _network_errors() as error:
        if (isinstance(error, HfHubHTTPError) and error.response.status_code < 500) or _of_disk(error):
            raise
        offline, unreached = constants.is_offline_mode(), f"{constants.ENDPOINT} cannot be reached ({_brief(error)})"
        absent = (
            f"HF_HUB_OFFLINE keeps it from being fetched; unset that, or fill the cache with `hf download {repo}`"
            if offline
            else f"{unreached}; check the network and HF_ENDPOINT"
        )
        try:
            folder = Path(hub.snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[]))
        except LocalEntryNotFoundError:
            kind = ModelRefused if offline else Unavailable
            raise kind(f"no such path here, not in the cache ({constants.HF_HUB_CACHE}), and {absent}") from error
    if not offline:
        tell(f"{unreached}: taking {repo} from the cache")
    cached = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return folder.name, dict.fromkeys(sorted(cached), 0), absent


def _limit_waits() -> None:
    """Have requests without a timeout, such as those that list files for a download, wait ANSWER_TIMEOUT_S at most.

    huggingface_hub repeats some of them; it is not to do so more often than a download is tried.
    """
    from huggingface_hub import get_session

    _unanswered.clear()
    hooks = get_session().event_hooks
    if _limit_wait not in hooks["request"]:
        get_session().event_hooks = {
            "request": [*hooks["request"], _limit_wait],
            "response": [*hooks["response"], _note_answer],
        }


_unanswered: Counter[str] = Counter()
"""How often each address was asked in vain by requests without a timeout."""


def _limit_wait(request: Any) -> None:
    """Set the times of a request that has none. Raises ConnectionError once it has had no answer ATTEMPTS times."""
    given = request.extensions.get("timeout", {})
    times = ("connect", "read", "write", "pool")
    if all(given.get(name) is not None for name in times):
        return
    address = str(request.url)
    if _unanswered[address] == ATTEMPTS:
        raise ConnectionError(f"no answer in {ATTEMPTS} times {ANSWER_TIMEOUT_S:g} s")
    _unanswered[address] += 1
    request.extensions["timeout"] = {
        name: ANSWER_TIMEOUT_S if given.get(name) is None else given[name] for name in times
    }


def _note_answer(response: Any) -> None:
    _unanswered.pop(str(response.request.url), None)


def _download(repo: str, revision: str, commit: str, sizes: Mapping[str, int], tell: Tell, absent: str) -> Path:
    """Fetch files that the cache does not have; return the folder of their commit, where all of them are then.

    revision: what the cache shall remember the commit by. sizes: bytes by file. absent: fetch nothing, for this reason.
    """
    import huggingface_hub as hub
    from huggingface_hub.constants import HF_HUB_CACHE

    for left in reversed(range(ATTEMPTS)):
        cached = [path for path in sizes if isinstance(hub.try_to_load_from_cache(repo, path, revision=commit), str)]
        due = sum(size for path, size in sizes.items() if path not in cached)
        if len(cached) < len(sizes):
            count = counted(len(sizes) - len(cached), "file")
            tell(f"fetching {repo} at commit {commit}: {count}, {_size(due)}, into {HF_HUB_CACHE}")
            _check_room(Path(HF_HUB_CACHE), due)
        try:
            folder = hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=[glob.escape(path) for path in sizes],
                local_files_only=bool(absent),
                tqdm_class=_bar(lambda done, due=due: tell(f"fetching {repo}: {_size(done)} of {_size(due)}")),  # type: ignore[misc]
            )
            return Path(folder)
        except _network_errors() as error:
            if not left or not _may_pass(error):
                raise
            tell(f"the download of {repo} broke off ({_brief(error)}); it goes on")
            time.sleep(1.0)
    raise AssertionError("the last attempt returns or raises")


def _check_room(cache: Path, due: int) -> None:
    """Raise ModelRefused unless the disk of the cache has room for so many bytes."""
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if due > (free := shutil.disk_usage(there).free):
        raise ModelRefused(f"{_size(due)} are to come, and {cache} has room for {_size(free)}; {_ROOM}")


_ROOM = "make room, or set HF_HOME to a folder on another disk"


def _bar(tell: Callable[[int], None]) -> Any:
    """Return the class that huggingface_hub counts bytes with; it calls `tell` with them every TELL_S seconds."""
    from tqdm.auto import tqdm

    last, most = time.monotonic(), 0

    class Progress(tqdm):  # type: ignore[misc]
        """A progress bar that shows nothing."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})
            self._in_bytes = options.get("unit") == "B"

        def update(self, n: float | None = 1) -> None:
            nonlocal last, most
            self.n += n or 0
            most = max(most, int(self.n) if self._in_bytes else 0)  # one bar counts what has come, one what is written
            if self._in_bytes and time.monotonic() - last >= TELL_S:
                last = time.monotonic()
                tell(most)

    return Progress


def _size(count: int) -> str:
    """Return a number of bytes for people."""
    for unit, power in (("GB", 3), ("MB", 2), ("kB", 1)):
        if count >= 1000**power:
            return f"{count / 1000**power:.1f} {unit}"
    return f"{count} bytes"


@contextlib.contextmanager
def _ended_at_once() -> Iterator[None]:
    """Have SIGINT and SIGTERM end the process at once, without the unfinished files, which nothing could go on with.

    huggingface_hub by itself would wait for every file that is under way.
    """

    def end(number: int, _: object) -> None:
        with contextlib.suppress(OSError):  # only Linux says which files are open
            for link in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(OSError):
                    if (file := os.readlink(link)).endswith(".incomplete"):
                        os.unlink(file)
        os._exit(128 + number)

    before = {}
    with contextlib.suppress(ValueError):  # Python interrupts its main thread alone
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- errors


def _network_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HTTPError,
        XetDownloadError,
    )

    return HTTPError, OSError, RuntimeError, XetDownloadError


def _may_pass(error: Exception) -> bool:
    """Return whether another attempt may succeed."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    return not _of_disk(error) and type(error) is not ConnectionError  # of _limit_wait


def _of_disk(error: Exception) -> bool:
    """Return whether the operating system raised an error; those of connections are of other classes here."""
    return isinstance(error, OSError) and error.errno is not None


@contextlib.contextmanager
def _refusals(where: str, repo: str, revision: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence that says what to do; `where` begins it."""
    try:
        from huggingface_hub import constants, errors, get_token
    except ImportError as error:
        raise ImportError(
            f"{where}: no such path here, and ids of the hub need: pip install huggingface_hub"
        ) from error
    endpoint = constants.ENDPOINT
    token = "the token in HF_TOKEN or of `hf auth login`"
    try:
        yield
    except (ModelRefused, Unavailable) as error:
        raise type(error)(f"{where}: {error}") from error
    except errors.HFValidationError as error:
        raise ModelRefused(f"{where}: no such path here, and no id on the hub: {_brief(error)}") from error
    except errors.GatedRepoError as error:
        way = f"{token} may not read it" if get_token() else "set HF_TOKEN to a token of an account that may read it"
        raise ModelRefused(f"{where}: the repository is gated: accept its terms at {endpoint}/{repo}; {way}") from error
    except errors.RepositoryNotFoundError as error:
        way = f"check the name, and whether {token} may read it" if get_token() else "check the name, or set HF_TOKEN"
        raise ModelRefused(
            f"{where}: no such path here, and {endpoint} has no such repository, or a private one; {way}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelRefused(
            f"{where}: the repository has no revision {revision}; give a branch, a tag or a whole commit hash"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ModelRefused(
                f"{where}: {endpoint} refuses {token} ({status}); make a new one that may read it"
            ) from error
        raise Unavailable(f"{where}: {endpoint} answers with HTTP status {status}; try again later") from error
    except _network_errors() as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ModelRefused(f"{where}: the disk of {constants.HF_HUB_CACHE} is full; {_ROOM}") from error
        if _of_disk(error):
            raise ModelRefused(f"{where}: {error}; can {constants.HF_HUB_CACHE} be written?") from error
        raise Unavailable(
            f"{where}: the download broke off ({_brief(error)}); run it again, whole files are kept"
        ) from error


def _brief(error: BaseException) -> str:
    """Return an error's class and the first line that it says, or its cause's where huggingface_hub hides that."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    said = (str(error).strip().splitlines() or [""])[0]
    return clean(f"{type(error).__name__}: {said}" if said else type(error).__name__)
