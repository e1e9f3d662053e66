"""The spike response model neuron: reference, definition and implementations, one a file."""

from spikemark.kernels._callable import make_callable

make_callable(__name__)
