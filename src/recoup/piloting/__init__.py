"""The autopilot: a training step that ran out of memory is repeated under a smaller plan, with the same result."""

from recoup.piloting.events import Event
from recoup.piloting.pilot import Autopilot, autopilot

__all__ = ["Autopilot", "Event", "autopilot"]
