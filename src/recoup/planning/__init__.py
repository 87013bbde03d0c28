"""The planner: the fastest schedule under a byte budget. It knows numbers only, nothing of torch."""

from recoup.planning.actions import Action, Backward, Drop, Fetch, Forward, Keep, Send, Value, Wait
from recoup.planning.problem import Link, Option, Problem, Unit
from recoup.planning.schedule import Schedule, trace
from recoup.planning.simulate import simulate
from recoup.planning.simulation import Moment, Simulation

__all__ = [
    "Action",
    "Backward",
    "Drop",
    "Fetch",
    "Forward",
    "Keep",
    "Link",
    "Moment",
    "Option",
    "Problem",
    "Schedule",
    "Send",
    "Simulation",
    "Unit",
    "Value",
    "Wait",
    "simulate",
    "trace",
]
