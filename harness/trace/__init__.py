"""Tracing: start, collect and read back torch.profiler, Nsight Systems and Nsight Compute."""
