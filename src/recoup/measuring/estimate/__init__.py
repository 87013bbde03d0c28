"""Steps estimated for hardware that is not there: fake tensors, rooflines, shards over ranks."""

from recoup.measuring.estimate.benchmark import measure_hardware
from recoup.measuring.estimate.cluster import INFINIBAND_BYTES_PER_S, Cluster, read_ranks
from recoup.measuring.estimate.faking import faked, units_in_copy
from recoup.measuring.estimate.known import KNOWN, PUBLISHED_EFFICIENCY, find_hardware
from recoup.measuring.estimate.machine import Hardware, read_hardware, write_hardware
from recoup.measuring.estimate.sharding import sharded

__all__ = [
    "INFINIBAND_BYTES_PER_S",
    "KNOWN",
    "PUBLISHED_EFFICIENCY",
    "Cluster",
    "Hardware",
    "faked",
    "find_hardware",
    "measure_hardware",
    "read_hardware",
    "read_ranks",
    "sharded",
    "units_in_copy",
    "write_hardware",
]
