"""Pages in Debian's Chromium, driven by playwright through the path of its executable.

As a program it takes a picture of a page, such as the README's:

    python -m tests.training.pictures.chromium runs/quickstart/report.html docs/report.png
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDE, NARROW = (1280, 900), (390, 844)


def executable() -> str | None:
    """Return the path of Chromium, of CHROMIUM or where it is installed; None without one."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


def missing() -> str:
    """Return what is missing to draw pages; empty if nothing is."""
    if importlib.util.find_spec("playwright") is None:
        return "browser: no playwright; pip install -c constraints.txt -e '.[browser]'"
    if executable() is None:
        return "browser: no Chromium; apt-get install chromium, or set CHROMIUM to its path"
    return ""


@dataclass
class Opened:
    """A page that is drawn.

    Attributes:
        page: playwright's page.
        messages: Whatever the console and errors said.
        requests: Addresses that were asked for, besides the page's own.
    """

    page: Page
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def press(self, name: str, value: str) -> None:
        """Press a button of the bar and wait until the charts are drawn anew."""
        self.page.click(f'button[data-{name}="{value}"]')
        self.wait()

    def wait(self) -> None:
        """Wait until the charts are drawn."""
        self.page.wait_for_function("document.body.dataset.drawn")

    def read(self, script: str, argument: object = None) -> Any:
        """Return the value of a JavaScript function."""
        return self.page.evaluate(script, argument)


@contextlib.contextmanager
def running() -> Iterator[Browser]:
    """Start a browser without a window; it ends with the context."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # In a container, where tests run as root, Chromium's own sandbox cannot start.
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(
    browser: Browser, path: Path, *, size: tuple[int, int] = WIDE, theme: str = "light"
) -> Iterator[Opened]:
    """Open a file in a window of a size and draw it; nothing else can be loaded.

    Args:
        browser: The browser.
        path: The file.
        size: Width and height of the window.
        theme: What the system of the reader prefers.
    """
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, offline=True
    )
    page = context.new_page()
    found = Opened(page)
    address = path.resolve().as_uri()
    page.on("console", lambda message: found.messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: found.messages.append(f"error: {error}"))
    page.on(
        "request",
        lambda request: request.url in (address, "data:,") or found.requests.append(request.url),
    )
    page.goto(address)
    try:
        if not found.messages:
            found.wait()
        yield found
    finally:
        context.close()


def main() -> None:
    """Take a picture of the upper part of a page."""
    parser = argparse.ArgumentParser(description="Take a picture of a page.")
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--size", type=int, nargs=2, default=(1200, 980))
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    options = parser.parse_args()
    width, height = options.size
    with (
        running() as browser,
        opened(browser, options.page, size=(width, height), theme=options.theme) as found,
    ):
        found.page.screenshot(path=options.picture)
    print(f"wrote {options.picture} ({options.picture.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
