"""Make README's picture of the demo from a run of it: `python -m tools.picture`."""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "demo.svg"
COLUMNS = 112
QUESTIONS = 2
"""So many of the demo's questions are shown."""
_FONTS_AND_CLIPS = re.compile(r'@font-face \{.*?\}\s*|<clipPath.*?</clipPath>\s*| clip-path="[^"]*"', re.DOTALL)


def main() -> int:
    """Run the demo in a terminal of its own, and write what it shows. Returns its exit status."""
    output = bytearray()

    def read(terminal: int) -> bytes:
        data = os.read(terminal, 65536)
        output.extend(data)
        return data

    command = shutil.which("outrider", path=os.path.dirname(sys.executable)) or "outrider"
    status = os.waitstatus_to_exitcode(pty.spawn([command, "demo"], read))
    if not status:
        PICTURE.write_text(svg(output.decode(errors="replace").replace("\r\n", "\n")), encoding="utf-8")
    return status


def svg(output: str) -> str:
    """Return the demo's first questions as a picture. output: all that it wrote, with the terminal's codes."""
    legend, *answers = output[output.index("Tokens ") :].split("\n\n>")
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi("\n\n>".join([legend, *answers[:QUESTIONS]]).strip()))
    picture = console.export_svg(title="outrider demo", unique_id="demo")
    # The letters are the reader's own: fonts from elsewhere are not loaded, and taller letters are not cut off.
    return _FONTS_AND_CLIPS.sub("", picture)


if __name__ == "__main__":
    sys.exit(main())
