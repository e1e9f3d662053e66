"""How a case is measured: clock, memory, gate, NVTX, environment, supervision, records. Imports only kernels."""
