"""What a person reads: tables, figures, HTML, comparison of runs. Reads run folders; imports no torch.

``load(RUN...)`` gives a tidy pandas DataFrame, ``html.write`` the page, ``export`` the other formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load"]


def load(*runs: str | Path) -> pd.DataFrame:
    """One row a case and environment: the columns of results.csv, then ``run`` and what else is known of the case.

    Several runs are read as one: passes of the same device and code add up. Times in seconds, sizes in bytes, rates and
    ``roofline`` as fractions. Raises ``UsageError`` for a folder that is no run, when no folder is given, or when two
    contradict each other.
    """
    from spikemark.reports.rows import frame, read

    return frame(read(list(runs)))
