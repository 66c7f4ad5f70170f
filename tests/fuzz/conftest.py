"""The mutations are those of `loadtests.fuzz`, which sends them to a running server."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
