"""What all tests share."""

from hypothesis import settings

# A busy machine makes no property wrong.
settings.register_profile("halftone", deadline=None)
settings.load_profile("halftone")
