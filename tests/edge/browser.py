"""Drive the chat page in a headless Chromium, Debian's package with its own driver, without other downloads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from demanded import missing
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_S = 30.0
SPANS = "[...document.querySelectorAll('.answer:last-child .said span')]"
"""JavaScript for the spans of the last answer, each a run of tokens of one provenance."""


class Page:
    """Drive a page as its user would. Its methods leave the event loop free."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    async def open(self, url: str, *, width: int = 1100, height: int = 760, dark: bool = False) -> None:
        """Open a new page, without the state of another one."""
        await self._command("Emulation.setDeviceMetricsOverride", width=width, height=height, **_PLAIN)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._command("Emulation.setEmulatedMedia", features=[scheme])
        await asyncio.to_thread(self._driver.get, "about:blank")
        await self.complaints()
        await self.hosts()
        await asyncio.to_thread(self._driver.get, url)

    async def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page and return its result."""
        return await asyncio.to_thread(self._driver.execute_script, script, *arguments)

    async def until(self, condition: str) -> None:
        """Wait for an expression to be true."""
        give_up = time.monotonic() + WAIT_S
        while not await self.run(f"return Boolean({condition})"):
            if time.monotonic() > give_up:
                pytest.fail(f"never came true: {condition}; the page says {await self.text('body')!r}")
            await asyncio.sleep(0.02)

    async def text(self, selector: str) -> str:
        return await self.run("return document.querySelector(arguments[0]).innerText", selector)

    async def press(self, *keys: str) -> None:
        """Send keys to the focused element."""
        await asyncio.to_thread(ActionChains(self._driver).send_keys(*keys).perform)

    async def press_with_shift(self, key: str) -> None:
        chain = ActionChains(self._driver).key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT)
        await asyncio.to_thread(chain.perform)

    async def click(self, selector: str) -> None:
        await asyncio.to_thread(self._driver.find_element(By.CSS_SELECTOR, selector).click)

    async def set(self, name: str, value: object) -> None:
        """Set the value of a field under Settings."""
        await self.run(
            "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
            "field.dispatchEvent(new Event('change'));",
            name,
            str(value),
        )

    async def ask(self, text: str) -> None:
        """Send a message, as the keyboard does."""
        await self.run("document.getElementById('text').focus()")
        await self.press(text, Keys.ENTER)

    async def answered(self) -> str:
        """Return the text of the last answer once it is complete."""
        await self.until("document.querySelector('.answer:last-child .after')")
        return await self.run("return document.querySelector('.answer:last-child .said').textContent")

    async def runs(self) -> list[list[str]]:
        """Return the spans of the last answer, with their classes."""
        return await self.run(f"return {SPANS}.map(span => [span.className, span.textContent])")

    async def complaints(self) -> list[str]:
        """Return the console's messages since the last call."""
        return [entry["message"] for entry in await asyncio.to_thread(self._driver.get_log, "browser")]

    async def hosts(self) -> set[str]:
        """Return the hosts that it has contacted since the last call."""
        entries = await asyncio.to_thread(self._driver.get_log, "performance")
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        urls = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return {urlsplit(url).netloc for url in urls} - {""}

    async def _command(self, name: str, **parameters: Any) -> None:
        await asyncio.to_thread(self._driver.execute_cdp_cmd, name, parameters)


_PLAIN = {"deviceScaleFactor": 1, "mobile": False}


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Yield a browser with an empty profile in this folder."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        missing("no chromium, or no chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Page(running)
    finally:
        running.quit()
