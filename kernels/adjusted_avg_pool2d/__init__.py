"""Average pooling whose gradient is shared by the spikes in the window."""
