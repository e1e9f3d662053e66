"""The colour of an implementation stands beside its name in the table, however long the name and narrow the window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from spikemark.reports import html

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("width", [390, 1280])
def test_a_colour_is_never_left_alone_on_its_line(browser: Any, tmp_path: Path, width: int) -> None:
    found = [synthetic.record(case, 0) for case in synthetic.cases(batches=(4, 8))]
    names = {name: f"native_compact+{name}" for name in {r.case.implementation for r in found}}
    long = [replace(r, case=replace(r.case, implementation=names[r.case.implementation])) for r in found]
    page = html.write([synthetic.write(tmp_path / "r", long, passes=1)])
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    shown, apart, outside = browser.execute_script(
        """const pairs = [...document.querySelectorAll('#body td[data-id=implementation]')].map(td =>
          [td.getBoundingClientRect(), ...['.key', 'bdi'].map(what => td.querySelector(what).getClientRects()[0])]);
        return [pairs.length,
          pairs.filter(([, key, text]) => key.top > text.bottom || key.bottom < text.top).length,
          pairs.filter(([td, key, text]) => key.left < td.left || key.right > text.left + 1).length];"""
    )
    assert shown > 10 and (apart, outside) == (0, 0)
