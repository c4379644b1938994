"""Take the picture of the chat page for the documentation, docs/images/page.png.

    outrider up                      # and, in another terminal:
    outrider-edge serve
    python tools/screenshot.py http://127.0.0.1:8080/

It needs the package playwright and a Chromium, that of --browser or playwright's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "page.png"
QUESTIONS = ("What is gravity?", "Write a Python function that reverses a string.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of `outrider-edge serve`")
    parser.add_argument("--browser", help="Chromium's executable [default: playwright's own]")
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        page.goto(options.url)
        page.wait_for_selector("#send:not([disabled])")
        page.click("#settings summary")
        page.fill("#temperature", "0")
        page.fill("#max_tokens", "120")
        page.click("#settings summary")
        for question in QUESTIONS:
            page.fill("#text", question)
            page.click("#send")
            page.wait_for_selector("#stop", state="visible")
            page.wait_for_selector("#stop", state="hidden", timeout=120_000)
        page.screenshot(path=PICTURE)
        browser.close()
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
