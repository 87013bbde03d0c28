"""A device in a few numbers: what its memory holds and how fast it computes, reads and starts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from recoup.errors import HardwareError
from recoup.measuring.estimate.classes import wider_classes
from recoup.measuring.estimate.curves import KernelCurve
from recoup.sizes import format_bytes

__all__ = ["Hardware", "read_hardware", "write_hardware"]

_FORMAT, _VERSION = "recoup.hardware", 1
_HALF = (torch.bfloat16, torch.float16)
_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device in numbers.

    Attributes:
        name: what reports call it.
        memory_bytes: of the device.
        float32_flops_per_s: of matrix products; also what double precision is estimated from, at half of it.
        tf32_flops_per_s: of float32 matrix products where torch may round their factors; 0 if it cannot.
        half_flops_per_s: in bfloat16 and float16.
        float8_flops_per_s: 0 if it has none.
        bandwidth_bytes_per_s: of its memory, reads and writes together.
        host_link_bytes_per_s: between it and the host, one way.
        peer_bytes_per_s: between it and another one in the same node, one way; 0 if that goes through the host's link.
        latency_s: the least that an operation takes, where the seconds of its class were not measured.
        efficiency: the share of these figures that operations of such classes reach: 1 for measured figures.
        kernels: seconds of classes of kernels, measured at several sizes.
        host_s: of the host for one operation of a step, forward or backward; 0 where the device is the host, and where
            it is not known. Where these are more than the device's seconds, they set the pace.
        workspace_bytes: what its libraries hold once they have run.
        device_type: ``"cuda"`` or ``"cpu"``: whose choice of kernels and whose rounding of sizes to expect.

    >>> laptop = Hardware(
    ...     name="laptop", memory_bytes=2**34, float32_flops_per_s=1e11, half_flops_per_s=1e11,
    ...     bandwidth_bytes_per_s=2e10, host_link_bytes_per_s=1e10, latency_s=5e-6, device_type="cpu",
    ... )
    >>> print(laptop)
    laptop: 16.0 GiB at 20 GB/s; 0.1 TFLOP/s in float32, 0.1 in bfloat16; 5 us an operation.
    """

    name: str
    memory_bytes: int
    float32_flops_per_s: float
    half_flops_per_s: float
    bandwidth_bytes_per_s: float
    host_link_bytes_per_s: float
    latency_s: float
    tf32_flops_per_s: float = 0.0
    float8_flops_per_s: float = 0.0
    efficiency: float = 1.0
    workspace_bytes: int = 0
    device_type: Literal["cuda", "cpu"] = "cuda"
    host_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    kernels: tuple[KernelCurve, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise HardwareError(f"Hardware needs a name that is text and not empty; got {self.name!r}.")
        if self.device_type not in _DEVICES:
            raise HardwareError(f"{self.name}: device_type is 'cuda' or 'cpu'; got {self.device_type!r}.")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name not in ("name", "device_type", "kernels"):
                self._check_number(entry.name, value, is_whole=entry.name.endswith("_bytes"))
        if self.efficiency > 1:
            raise HardwareError(f"{self.name}: efficiency is a share of at most 1; got {self.efficiency}.")

    def _check_number(self, field: str, value: Any, *, is_whole: bool) -> None:
        may_be_zero = field in (
            "tf32_flops_per_s", "float8_flops_per_s", "workspace_bytes", "latency_s", "host_s", "peer_bytes_per_s"
        )  # fmt: skip
        kinds = int if is_whole else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (value == 0 and not may_be_zero):
            what = "a whole number of bytes" if is_whole else "a finite number"
            raise HardwareError(f"{self.name}: {field} must be {what} above 0; got {value!r}.")

    @property
    def rounding_bytes(self) -> int:
        """What its allocator rounds sizes up to."""
        return 512 if self.device_type == "cuda" else 1

    def curve(self, kind: str) -> KernelCurve | None:
        """The measured seconds of a class of kernels, or of a wider one; ``None`` where there are none."""
        return next((self._curves[name] for name in wider_classes(kind) if name in self._curves), None)

    @cached_property
    def _curves(self) -> dict[str, KernelCurve]:
        return {curve.name: curve for curve in self.kernels}

    def flops_per_s(self, dtype: torch.dtype, *, allow_tf32: bool = False) -> float:
        """What matrix products of a dtype reach."""
        return self.peak_flops_per_s(dtype, allow_tf32=allow_tf32) * self.efficiency

    def peak_flops_per_s(self, dtype: torch.dtype, *, allow_tf32: bool = False) -> float:
        """The figure for matrix products of a dtype."""
        if dtype in _HALF:
            return self.half_flops_per_s
        if dtype.itemsize == 1:
            return self.float8_flops_per_s or self.half_flops_per_s
        if dtype.itemsize > 4 and dtype.is_floating_point:
            return self.float32_flops_per_s / 2
        return (allow_tf32 and self.tf32_flops_per_s) or self.float32_flops_per_s

    @property
    def bytes_per_s(self) -> float:
        """What reads and writes reach."""
        return self.bandwidth_bytes_per_s * self.efficiency

    def __str__(self) -> str:
        return (
            f"{self.name}: {format_bytes(self.memory_bytes)} at {self.bandwidth_bytes_per_s / 1e9:.4g} GB/s;"
            f" {self.float32_flops_per_s / 1e12:.3g} TFLOP/s in float32, {self.half_flops_per_s / 1e12:.3g} in"
            f" bfloat16; {self.latency_s * 1e6:.3g} us an operation."
        )


def write_hardware(hardware: Hardware, path: str | Path) -> None:
    """Writes a file that `find_hardware` and ``--hardware`` read."""
    Path(path).write_text(hardware_to_json(hardware) + "\n", encoding="utf-8")


def hardware_to_json(hardware: Hardware) -> str:
    """What `write_hardware` writes: one line for each number, and one for each class of kernels."""
    numbers = {**asdict(hardware), "kernels": []}
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "hardware": numbers}, indent=2)
    if not hardware.kernels:
        return text
    # Found once: in a name, quotes would be escaped.
    curves = ",\n".join(f"      {json.dumps(asdict(curve))}" for curve in hardware.kernels)
    return text.replace('"kernels": []', f'"kernels": [\n{curves}\n    ]')


def read_hardware(path: str | Path) -> Hardware:
    """Reads what `write_hardware` wrote.

    Raises:
        HardwareError: the file is missing, damaged, or no hardware of ours.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(f"Cannot read {str(path)!r}: {error.strerror or error}.") from None
    except ValueError as error:
        raise HardwareError(f"{str(path)!r} is not JSON: {error}.") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise HardwareError(f"{str(path)!r} is no file written by `recoup hardware`.")
    if document.get("version") != _VERSION:
        raise HardwareError(
            f"{str(path)!r} is version {document.get('version')!r} of the format; this recoup reads version"
            f" {_VERSION}. Write it again with `recoup hardware`."
        )
    try:
        found = document["hardware"]
        kernels = tuple(KernelCurve(**curve) for curve in found.get("kernels", ()))
        return Hardware(**{**found, "kernels": kernels})
    except HardwareError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise HardwareError(
            f"{str(path)!r} is damaged: {error}. Write it again with `recoup hardware`."
        ) from None
