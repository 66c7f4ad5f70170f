"""What a server's processes hold, over time, and whether that grows."""

from loadtests.growth.figures import Figures, Watch
from loadtests.growth.trend import BOUNDS, MOST_NEW_SERIES, Growth, grown, growths

__all__ = ["BOUNDS", "MOST_NEW_SERIES", "Figures", "Growth", "Watch", "grown", "growths"]
