"""``python -m spikemark``: the command line."""

import sys

from spikemark.runner import main

if __name__ == "__main__":
    sys.exit(main())
