"""Raw CUDA kernels: their sources as text (``source``), and their launch, the only GPU-only lines (``launch``)."""
