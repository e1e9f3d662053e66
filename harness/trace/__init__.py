"""Tracing: start, collect and read back torch.profiler, Nsight Systems and Nsight Compute. Torch-free at import."""

CAPTURE = "capture"
"""The NVTX range that tells an outside tool what to collect."""
CALL, FLUSH = "call ", "flush"
"""Names of torch.profiler's ranges: each traced call (and its number), and the flush of caches before it."""


def profiled(key: str) -> str:
    """The name of the NVTX range round each traced call of a case."""
    return f"profile {key}"
