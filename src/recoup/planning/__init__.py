"""The planner: the fastest schedule under a byte budget. It knows numbers only, nothing of torch."""

from recoup.planning import graphs
from recoup.planning.actions import Action, Backward, Drop, Fetch, Forward, Keep, Send, Value, Wait
from recoup.planning.encoding import FORMAT_VERSION, from_json, to_json
from recoup.planning.graphs.dag import DagPlan, dag_frontier, minimum_dag_budget, solve_dag
from recoup.planning.graphs.hold import HoldFrontier, HoldPlan, hold_frontier, hold_plan, hold_plans
from recoup.planning.lifetimes import Lifetime, Phase, Use
from recoup.planning.plan import Plan, frontier, minimum_budget, plan
from recoup.planning.problem import Link, Option, Problem, Unit
from recoup.planning.schedule import Schedule, trace
from recoup.planning.simulate import simulate
from recoup.planning.simulation_result import Moment, Simulation
from recoup.planning.solvers.base import Bound
from recoup.planning.solvers.revolve import revolve
from recoup.planning.solvers.revolve.online import OnlineRevolve

__all__ = [
    "FORMAT_VERSION",
    "Action",
    "Backward",
    "Bound",
    "DagPlan",
    "Drop",
    "Fetch",
    "Forward",
    "HoldFrontier",
    "HoldPlan",
    "Keep",
    "Lifetime",
    "Link",
    "Moment",
    "OnlineRevolve",
    "Option",
    "Phase",
    "Plan",
    "Problem",
    "Schedule",
    "Send",
    "Simulation",
    "Unit",
    "Use",
    "Value",
    "Wait",
    "dag_frontier",
    "from_json",
    "frontier",
    "graphs",
    "hold_frontier",
    "hold_plan",
    "hold_plans",
    "minimum_budget",
    "minimum_dag_budget",
    "plan",
    "revolve",
    "simulate",
    "solve_dag",
    "to_json",
    "trace",
]
