"""Create the publisher's key, whose owner can put drafts on every device that trusts it."""

from __future__ import annotations

from pathlib import Path

from outrider.artifacts import atomic_files
from outrider.core.errors import BadRequest
from outrider.wire.ticket import Signer


def create(path: Path) -> Signer:
    """Create a key in a file that only its owner can read. Raises BadRequest if the file exists."""
    path = path.expanduser()
    if path.exists():
        raise BadRequest(f"{path} exists; a key that devices trust is not overwritten: give another name", field="key")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    signer = Signer.generate()
    atomic_files.write(path, signer.pem(), mode=0o600)
    return signer
