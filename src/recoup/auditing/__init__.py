"""Is this model safe to replay? Which unit is not, why, and what recoup does about it."""

from recoup.auditing.findings import Audit, Finding, Kind
from recoup.auditing.run import audit, audit_step

__all__ = ["Audit", "Finding", "Kind", "audit", "audit_step"]
