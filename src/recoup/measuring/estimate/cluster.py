"""Ranks that train together: how many, how they share the model, and the links between them.

NOTE [ Links ]
    1. Collectives are rings. A rank takes part of ``(ranks - 1) / ranks`` of the bytes over its link inside the node.
    2. With several nodes, what the other nodes have enters each node once, over the network links of all its ranks
       together, and is passed on inside. Both go on at once: the slower one counts.
    3. The speeds are those of the makers, which collectives do not quite reach: seconds of communication are a lower
       bound, as long as no measured speeds are given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from recoup.errors import HardwareError, SampleError
from recoup.measuring.estimate.machine import Hardware

__all__ = ["INFINIBAND_BYTES_PER_S", "Cluster", "read_ranks"]

INFINIBAND_BYTES_PER_S = 50e9
"""One InfiniBand NDR port of 400 Gb/s for each GPU, one way, by NVIDIA's data sheets of the DGX H100 and H200."""
_KINDS = ("fsdp2", "ddp")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks that train one model together, each on its own batch.

    Attributes:
        ranks: how many they are.
        kind: ``"fsdp2"`` divides parameters, gradients and optimizer state (``fully_shard`` on every unit and on the
            model); with ``"ddp"`` each rank has all of them, and gradients are summed up.
        reshard_after_forward: whether a unit's parameters are freed after its forward and gathered again for its
            backward (FSDP2's default), or stay.
        link_bytes_per_s: between two ranks of a node, one way; 0 for the hardware's own link.
        network_bytes_per_s: of each rank to other nodes, one way.
        ranks_per_node: how many ranks have links to each other.
        latency_s: of one collective.

    >>> Cluster(ranks=4, link_bytes_per_s=3e9).collective_s(8_000_000_000)
    2.0
    """

    ranks: int
    kind: Literal["fsdp2", "ddp"] = "fsdp2"
    reshard_after_forward: bool = True
    link_bytes_per_s: float = 0.0
    network_bytes_per_s: float = INFINIBAND_BYTES_PER_S
    ranks_per_node: int = 8
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SampleError(f"{name} must be a whole number of at least 1; got {value!r}.")
        if self.kind not in _KINDS:
            raise SampleError(f"A cluster's kind is 'fsdp2' or 'ddp'; got {self.kind!r}.")
        for name in ("link_bytes_per_s", "network_bytes_per_s", "latency_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name == "network_bytes_per_s"):
                raise HardwareError(f"A cluster's {name} must be a finite number above 0; got {value!r}.")

    def collective_s(self, num_bytes: int) -> float:
        """Seconds in which ranks gather, or reduce and scatter, so many bytes in all, by NOTE [ Links ]."""
        if self.ranks == 1 or num_bytes == 0:
            return 0.0
        inside = min(self.ranks, self.ranks_per_node)
        link_s = (self.ranks - 1) / self.ranks * num_bytes / self.link_bytes_per_s
        outside_s = (self.ranks - inside) / self.ranks * num_bytes / (inside * self.network_bytes_per_s)
        return max(link_s, outside_s) + self.latency_s


def read_ranks(ranks: int | Cluster, hardware: Hardware | None = None) -> Cluster:
    """``ranks=`` as a cluster, with the hardware's link unless it has another one.

    Raises:
        SampleError: it is no whole number of at least 1.
    """
    cluster = ranks if isinstance(ranks, Cluster) else Cluster(ranks=ranks)
    if cluster.link_bytes_per_s or hardware is None:
        return cluster
    return replace(cluster, link_bytes_per_s=hardware.peer_bytes_per_s or hardware.host_link_bytes_per_s)
