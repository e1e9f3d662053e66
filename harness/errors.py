"""The one error that means: the command line or an input file is wrong."""


class UsageError(ValueError):
    """Bad input. The message is one line that names what is wrong; the command line exits with 2."""


class NothingMeasured(Exception):
    """A valid request that leaves nothing to measure or compare; the command line exits with 4."""
