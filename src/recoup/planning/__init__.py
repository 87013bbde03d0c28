<<<<<<< HEAD
"""The planner: the fastest schedule under a byte budget. It knows numbers only, nothing of torch."""

from recoup.planning.actions import Action, Backward, Drop, Fetch, Forward, Keep, Send, Value, Wait
from recoup.planning.encoding import FORMAT_VERSION, from_json, to_json
from recoup.planning.plan import Plan, frontier, minimum_budget, plan
from recoup.planning.problem import Link, Option, Problem, Unit
from recoup.planning.schedule import Schedule, trace
from recoup.planning.simulate import simulate
from recoup.planning.simulation import Moment, Simulation
from recoup.planning.solvers.base import Bound
from recoup.planning.solvers.online import OnlineRevolve
from recoup.planning.solvers.revolve import revolve

__all__ = [
    "FORMAT_VERSION",
    "Action",
    "Backward",
    "Bound",
    "Drop",
    "Fetch",
    "Forward",
    "Keep",
    "Link",
    "Moment",
    "OnlineRevolve",
    "Option",
    "Plan",
    "Problem",
    "Schedule",
    "Send",
    "Simulation",
    "Unit",
    "Value",
    "Wait",
    "from_json",
    "frontier",
    "minimum_budget",
    "plan",
    "revolve",
    "simulate",
    "to_json",
    "trace",
]
=======
"""Plans from numbers: what to hold, drop and recompute under a byte budget. Knows nothing of torch."""
>>>>>>> 34786e75294b7b6e8406f3c838ffba8dffd22f05
