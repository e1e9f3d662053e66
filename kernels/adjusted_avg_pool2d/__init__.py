"""Average pooling whose gradient is shared by the spikes in the window."""

from spikemark.kernels._callable import make_callable

make_callable(__name__)
