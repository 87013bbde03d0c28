"""Where held activations live, in how many bits, and which of them make room for others."""

from recoup.stores.precision import Precision, error_bound
from recoup.stores.records import EntryInfo, StoreStats
from recoup.stores.store import ActivationStore

__all__ = ["ActivationStore", "EntryInfo", "Precision", "StoreStats", "error_bound"]
