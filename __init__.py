"""Spikemark: the benchmark and profiling suite for spiking-neural-network kernels.

Rooms: ``spikemark.kernels`` (what is measured), ``spikemark.harness`` (how), ``spikemark.suites`` (which
cases), ``spikemark.reports`` (what a person reads). Importing this package imports none of them.
"""

__version__ = "0.1.0"
