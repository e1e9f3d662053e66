"""The spiking linear layer, as results name it: reference, definition and implementations, one a file."""
