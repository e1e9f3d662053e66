"""Sign with a clamped straight-through gradient: reference, definition and implementations, one a file."""
