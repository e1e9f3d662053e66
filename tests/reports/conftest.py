"""Run folders and one browser, made once for all report tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic

BROWSER, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@pytest.fixture(scope="session")
def everyday(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two devices, three operators and one failure of every status."""
    return synthetic.everyday(tmp_path_factory.mktemp("runs") / "everyday")


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose names try to break out of the page."""
    return synthetic.hostile(tmp_path_factory.mktemp("runs") / "hostile")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium, started once; skipped with the reason where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = shutil.which("chromium") or BROWSER
    driver = shutil.which("chromedriver") or DRIVER
    for program in (binary, driver):
        if not Path(program).exists():
            pytest.skip(f"{Path(program).name} is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield session
    session.quit()
