"""Chains of hand-written forward and backward steps that hold only some of their activations."""

from recoup.manual.chain import Chain
from recoup.manual.run import Gradients, Run
from recoup.manual.scheduled import ScheduledRun
from recoup.manual.steps import Step

__all__ = ["Chain", "Gradients", "Run", "ScheduledRun", "Step"]
