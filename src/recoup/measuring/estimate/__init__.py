"""Steps estimated for hardware that is not there: fake tensors, rooflines, shards over ranks."""

from recoup.measuring.estimate.benchmark import measure_hardware
from recoup.measuring.estimate.faking import faked, units_in_copy
from recoup.measuring.estimate.known import KNOWN, PUBLISHED_EFFICIENCY, find_hardware
from recoup.measuring.estimate.machine import Hardware, read_hardware, write_hardware
from recoup.measuring.estimate.sharding import check_ranks, sharded

__all__ = [
    "KNOWN",
    "PUBLISHED_EFFICIENCY",
    "Hardware",
    "check_ranks",
    "faked",
    "find_hardware",
    "measure_hardware",
    "read_hardware",
    "sharded",
    "units_in_copy",
    "write_hardware",
]
