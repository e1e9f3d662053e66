"""The spiking convolution layer: any neuron with any convolution backward."""
