#!/usr/bin/env python
"""Checks the built documentation (scripts/build_docs.sh) in a browser, on a phone's width and on a laptop's.

No page may be wider than the window, no code may be cut off on a laptop, no picture may be missing, and the HTML must
parse without errors. Needs Chromium or Chrome with its driver, and `pip install selenium html5lib`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import html5lib
from selenium import webdriver

SITE = Path(__file__).parents[1] / "build/docs"
PHONE, LAPTOP = 390, 1280
TOO_WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
CUT = """
return [...document.querySelectorAll("article pre code")]
    .filter(code => code.scrollWidth > code.clientWidth + 1).map(code => code.textContent.trim().split("\\n")[0])
"""
MISSING = "return [...document.images].filter(image => !image.naturalWidth).map(image => image.src)"


def browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    # Root, as in a container, has no sandbox.
    for option in ("--headless=new", "--no-sandbox", "--allow-file-access-from-files", "--hide-scrollbars"):
        options.add_argument(option)
    # selenium would look for both on the internet.
    options.binary_location = which("chromium", "chromium-browser", "google-chrome")
    return webdriver.Chrome(options, webdriver.ChromeService(which("chromedriver")))


def which(*names: str) -> str:
    found = next(filter(None, map(shutil.which, names)), None)
    return found or sys.exit(f"this check needs one of {', '.join(names)} on the path")


def problems(driver: webdriver.Chrome, page: Path) -> Iterator[str]:
    parser = html5lib.HTMLParser()
    parser.parse(page.read_bytes())
    yield from (f"HTML, line {line}: {kind}" for (line, _), kind, _ in parser.errors)
    for width in (PHONE, LAPTOP):
        # Windows cannot be as narrow as a phone, but what they show can.
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(page.as_uri())
        wide = driver.execute_script(TOO_WIDE)
        if wide > 0:
            yield f"at {width} pixels it is {wide} pixels too wide"
        if width == LAPTOP:
            yield from (f"at {width} pixels this code is cut: {code}" for code in driver.execute_script(CUT))
            yield from (f"missing picture: {source}" for source in driver.execute_script(MISSING))


def main() -> None:
    pages = sorted(SITE.glob("*.html"))
    if not pages:
        sys.exit(f"no pages in {SITE}; scripts/build_docs.sh makes them")
    driver = browser()
    try:
        found = [f"{page.name}: {problem}" for page in pages for problem in problems(driver, page)]
    finally:
        driver.quit()
    print(*found, sep="\n")
    print(f"{len(pages)} pages, {len(found)} problems")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
