"""The two halves of a spiking convolution's backward: reference, definition and implementations, one a file."""
