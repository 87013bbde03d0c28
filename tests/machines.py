"""Hardware that is not there, for estimates."""

from __future__ import annotations

from recoup.measuring import Hardware

# As the host: sizes are not rounded, and its own kernels run.
HOST = Hardware(
    name="host",
    memory_bytes=2**34,
    float32_flops_per_s=1e11,
    half_flops_per_s=2e11,
    bandwidth_bytes_per_s=2e10,
    host_link_bytes_per_s=1e10,
    latency_s=5e-6,
    device_type="cpu",
)
