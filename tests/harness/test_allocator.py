"""What ``malloc`` does with freed memory in a measuring process, and that the environment says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from spikemark.harness import allocator

PROBE = """
import json, resource
from spikemark.harness import allocator, environment
import torch

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

allocator.keep_freed_memory()
counts = []
for size in (1 << 20, 1 << 22, 1 << 24):  # 4 to 64 MB
    for _ in range(10):  # the rests of aligned blocks fill malloc's small caches before blocks are found again
        torch.zeros(size)
    before = faults()
    for _ in range(4):
        torch.zeros(size)
    counts.append(faults() - before)
print(json.dumps([environment.switches()["malloc"], allocator.state(), counts]))
"""


def probe(**variables: str) -> tuple[str, str, list[int]]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    run = subprocess.run(
        [sys.executable, "-c", PROBE], env=kept | variables, capture_output=True, text=True, check=True
    )
    recorded, state, counts = json.loads(run.stdout)
    return recorded, state, counts


@pytest.mark.skipif(allocator._glibc("mallopt") is None, reason="malloc is not glibc's")
def test_results_do_not_pay_for_fresh_pages() -> None:
    recorded, state, counts = probe()
    assert recorded == state == allocator.KEEPS
    assert max(counts) < 100, "64 MB are 16,384 pages"


@pytest.mark.skipif(allocator._glibc("mallopt") is None, reason="malloc is not glibc's")
def test_who_has_chosen_is_left_alone() -> None:
    recorded, state, counts = probe(MALLOC_MMAP_THRESHOLD_="65536")
    assert recorded == state == allocator.DEFAULT
    assert max(counts) > 10_000, "each result is mapped anew: else this test shows nothing"
