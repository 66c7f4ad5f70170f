"""An open-loop load generator: requests leave when they are due, whatever became of those before."""

from loadtests.open_loop.arrivals import Bursts, arrivals
from loadtests.open_loop.exchange import Exchange, Mix
from loadtests.open_loop.generator import send_all
from loadtests.open_loop.outcome import Outcome

__all__ = ["Bursts", "Exchange", "Mix", "Outcome", "arrivals", "send_all"]
