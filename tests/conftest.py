"""What all tests share."""

import sys
from pathlib import Path

from hypothesis import settings

# Models that tests of several folders use.
sys.path.append(str(Path(__file__).parent / "models" / "sources"))
# Stand-ins that tests of several folders use.
sys.path.append(str(Path(__file__).parent / "fakes"))

# A busy machine makes no property wrong.
settings.register_profile("halftone", deadline=None)
settings.load_profile("halftone")
