"""``fit``: measure, plan, apply and verify in one call."""

from recoup.engines.verify import VerifiedSize
from recoup.fitting.fit_model import engines_for, fit, plan_to_fit, verify
from recoup.fitting.fitted import Fitted

__all__ = ["Fitted", "VerifiedSize", "engines_for", "fit", "plan_to_fit", "verify"]
