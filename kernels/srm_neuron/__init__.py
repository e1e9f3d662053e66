"""The spike response model neuron: reference, definition and implementations, one a file."""
