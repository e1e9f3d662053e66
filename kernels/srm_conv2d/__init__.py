"""The spiking convolution layer, as results name it: any neuron with any convolution backward: reference, definition and implementations, one a file."""
