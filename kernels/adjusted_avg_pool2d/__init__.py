"""Average pooling whose gradient is shared by the spikes in the window: reference, definition and implementations, one a file."""
