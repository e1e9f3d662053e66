"""One small font for many PDF files.

Every PDF must carry its font, and cutting DejaVu Sans (6,000 glyphs) down takes a second a file. It is cut down
once, to the characters of all pictures together; matplotlib then cuts a few kilobytes in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from matplotlib import get_data_path


def subset_font(characters: Iterable[str], folder: Path) -> Path:
    """Write DejaVu Sans with only these ``characters`` (and no kerning or ligatures) into ``folder``."""
    from fontTools import subset

    source = Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    options = subset.Options(layout_features=[], notdef_outline=True, hinting=False, name_IDs=[1, 2, 4, 6])
    options.drop_tables += ["GSUB", "GPOS", "GDEF", "kern", "FFTM"]
    font = subset.load_font(str(source), options)
    cutter = subset.Subsetter(options)
    cutter.populate(text="".join(sorted(set(characters))) + "0123456789 -")
    cutter.subset(font)
    path = folder / "DejaVuSans-subset.ttf"
    subset.save_font(font, str(path), options)
    return path
