"""GPUs by name, with the figures that their makers publish.

Classes of kernels are those of ``h200.json``, which ``benchmarks/estimates.py --name H200`` writes on an H200. All GPUs
of the table take them: kernels that take the same seconds at the peak are assumed to reach the same share of it.
"""

from __future__ import annotations

from pathlib import Path

from recoup.errors import HardwareError
from recoup.measuring.estimate.machine import Hardware, read_hardware

__all__ = ["KNOWN", "PUBLISHED_EFFICIENCY", "find_hardware"]

PUBLISHED_EFFICIENCY = 0.7
"""The share of a published figure that operations reach whose class of kernels was not measured, for computing and
memory alike. It scales all figures below; measured ones (``recoup hardware``) are not scaled."""

_GIB, _MIB, _TERA, _GIGA = 2**30, 2**20, 1e12, 1e9
# An eager operation of torch: the longer one of launch and dispatch.
_LATENCY_S = 4e-6
_MEASURED = read_hardware(Path(__file__).with_name("h200.json"))


def _gpu(
    name: str,
    gib: float,
    *,
    float32: float,
    tf32: float,
    half: float,
    float8: float,
    bandwidth: float,
    link: float,
    peer: float = 0,
    workspace_mib: int = 8,
) -> Hardware:
    """Memory in GiB as the driver reports it, TFLOP/s without sparsity, GB/s."""
    return Hardware(
        name=name,
        memory_bytes=round(gib * _GIB),
        float32_flops_per_s=float32 * _TERA,
        tf32_flops_per_s=tf32 * _TERA,
        half_flops_per_s=half * _TERA,
        float8_flops_per_s=float8 * _TERA,
        bandwidth_bytes_per_s=bandwidth * _GIGA,
        host_link_bytes_per_s=link * _GIGA,
        peer_bytes_per_s=peer * _GIGA,
        latency_s=_LATENCY_S,
        efficiency=PUBLISHED_EFFICIENCY,
        kernels=_MEASURED.kernels,
        host_s=_MEASURED.host_s,
        workspace_bytes=workspace_mib * _MIB,
    )


# The makers' data sheets. The link is PCIe x16, one way: 16 GB/s for version 3, 32 for 4, 64 for 5. The peer link is
# NVLink, one way, half of what the sheets add up: 900 GB/s for version 5 (B200), 450 for 4 (H100, H200), 300 for 3
# (A100), 150 for 2 (V100), each on boards with SXM sockets. The others have none here: their ranks meet over PCIe.
_GPUS = (
    _gpu(
        "B200",
        178,
        float32=75,
        tf32=1100,
        half=2250,
        float8=4500,
        bandwidth=8000,
        link=64,
        peer=900,
        workspace_mib=32,
    ),
    _gpu(
        "H200",
        139.8,
        float32=67,
        tf32=495,
        half=989,
        float8=1979,
        bandwidth=4800,
        link=64,
        peer=450,
        workspace_mib=32,
    ),
    _gpu(
        "H100",
        79.1,
        float32=67,
        tf32=495,
        half=989,
        float8=1979,
        bandwidth=3350,
        link=64,
        peer=450,
        workspace_mib=32,
    ),
    _gpu("A100-80GB", 79.2, float32=19.5, tf32=156, half=312, float8=0, bandwidth=2039, link=32, peer=300),
    _gpu("A100-40GB", 39.4, float32=19.5, tf32=156, half=312, float8=0, bandwidth=1555, link=32, peer=300),
    _gpu("L40S", 44.4, float32=91.6, tf32=183, half=362, float8=733, bandwidth=864, link=32),
    _gpu("L4", 22.0, float32=30.3, tf32=60, half=121, float8=242, bandwidth=300, link=32),
    _gpu("A10", 22.1, float32=31.2, tf32=62.5, half=125, float8=0, bandwidth=600, link=32),
    _gpu("V100", 31.7, float32=15.7, tf32=0, half=125, float8=0, bandwidth=900, link=16, peer=150),
    _gpu("T4", 14.6, float32=8.1, tf32=0, half=65, float8=0, bandwidth=320, link=16),
    _gpu("RTX 4090", 23.5, float32=82.6, tf32=82.6, half=165, float8=330, bandwidth=1008, link=32),
    _gpu("RTX 3090", 23.6, float32=35.6, tf32=35.6, half=71, float8=0, bandwidth=936, link=32),
)
KNOWN: dict[str, Hardware] = {gpu.name: gpu for gpu in _GPUS}
_OTHER_NAMES = {"a100": "A100-80GB"}


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def find_hardware(name_or_path: str | Path | Hardware) -> Hardware:
    """Hardware by its name, however it is spelt, or from a file written by ``recoup hardware``.

    Raises:
        HardwareError: there is neither; the text lists the known names.

    >>> find_hardware("h200").name, find_hardware("rtx4090").name
    ('H200', 'RTX 4090')
    """
    if isinstance(name_or_path, Hardware):
        return name_or_path
    known = {_plain(name): hardware for name, hardware in KNOWN.items()}
    known |= {other: KNOWN[name] for other, name in _OTHER_NAMES.items()}
    found = known.get(_plain(str(name_or_path))) if isinstance(name_or_path, str) else None
    if found is not None:
        return found
    if isinstance(name_or_path, Path) or (isinstance(name_or_path, str) and Path(name_or_path).is_file()):
        return read_hardware(name_or_path)
    raise HardwareError(
        f"There is no hardware {name_or_path!r}. Known are {', '.join(KNOWN)}; or a file written by"
        " `recoup hardware`."
    )
