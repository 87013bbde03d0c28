"""Classes of kernels: who belongs to which, curves by hand, and what an estimate makes of them."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from machines import HOST
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recoup.devices.meter import make_meter
from recoup.errors import HardwareError
from recoup.measuring import Hardware, measure, measure_hardware, read_hardware, write_hardware
from recoup.measuring.estimate import KNOWN, known
from recoup.measuring.estimate.classes import kernel_class
from recoup.measuring.estimate.curves import KernelCurve, KernelSample, fit_curves
from recoup.measuring.estimate.kernel_times import OperationTimer
from recoup.measuring.estimate.machine import hardware_to_json
from recoup.measuring.estimate.roofline import operation_s

aten = torch.ops.aten
CURVE = KernelCurve("elementwise", ((1e-6, 5e-6), (1e-4, 2e-4)))


def classes_of(run: Any) -> list[str]:
    found = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(kernel_class(func, args))
            return func(*args, **(kwargs or {}))

    with Seeing():
        run()
    return found


class TestClasses:
    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [
            (torch.bfloat16, "half"),
            (torch.float16, "half"),
            (torch.float32, "float32"),
            (torch.float64, "float64"),
        ],
    )
    def test_products_by_precision(self, dtype: torch.dtype, expected: str) -> None:
        x = torch.ones(4, 4, dtype=dtype)
        assert kernel_class(aten.mm.default, (x, x)) == f"matmul {expected}"
        assert kernel_class(aten.addmm.default, (x, x, x)) == f"matmul {expected}"

    def test_products_by_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.ones(4, 4)
        monkeypatch.setattr("recoup.measuring.estimate.classes.allows_tf32", lambda name: "conv" not in name)
        assert kernel_class(aten.bmm.default, (x[None], x[None])) == "matmul tf32"

    @pytest.mark.parametrize(
        ("layer", "kind"),
        [
            (nn.Conv2d(8, 8, 1, bias=False), "1x1"),
            (nn.Conv2d(8, 8, 3, bias=False), "spatial"),
            (nn.Conv2d(8, 8, 3, groups=8, bias=False), "grouped"),
        ],
    )
    def test_convolutions_by_kind_and_layout(self, layer: nn.Module, kind: str) -> None:
        x = torch.ones(2, 8, 5, 5)
        first, last = (
            [
                name
                for name in classes_of(
                    lambda sample=sample: layer(sample).backward(torch.ones_like(layer(sample)))
                )
                if "conv" in name
            ]
            for sample in (x, x.contiguous(memory_format=torch.channels_last))
        )
        assert set(first) == {f"convolution {kind} tf32", f"convolution {kind} tf32 backward"}
        assert f"convolution {kind} tf32 channels last" in last

    @pytest.mark.parametrize(("width", "word"), [(32, "narrow "), (64, ""), (128, "wide ")])
    def test_attention(self, width: int, word: str) -> None:
        q, k, v = (torch.ones(1, 2, 8, width, requires_grad=True) for _ in range(3))
        found = classes_of(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
        assert {name for name in found if "attention" in name} == {
            f"attention {word}float32",
            f"attention {word}float32 backward",
        }

    def test_attention_of_sequences_that_come_first(self) -> None:
        layer, x = nn.MultiheadAttention(128, 2, batch_first=True), torch.ones(3, 5, 128)
        found = classes_of(lambda: layer(x, x, x, need_weights=False)[0].sum().backward())
        assert {name for name in found if "attention" in name} == {
            "attention float32 strided",
            "attention float32 backward strided",
        }

    def test_what_moves_bytes(self) -> None:
        x, rows = torch.ones(4, 8), torch.arange(3)
        expected = {
            "layer norm": lambda: F.layer_norm(x, (8,)),
            "layer norm strided": lambda: F.layer_norm(x.t(), (4,)),
            "layer norm half": lambda: F.layer_norm(x.bfloat16(), (8,)),
            "softmax": lambda: x.softmax(-1),
            "log softmax": lambda: x.log_softmax(-1),
            "reduction": lambda: x.mean(0),
            "gather": lambda: F.embedding(rows, x),
            "scatter": lambda: x.index_add(0, rows, x[:3]),
            "copy": lambda: x.clone(),
            "copy strided": lambda: x.t().contiguous(),
            "resampling": lambda: F.max_pool2d(x[None], 2),
            "elementwise": lambda: x.lgamma(),
            "elementwise half": lambda: x.bfloat16().neg(),
            "elementwise strided": lambda: x + x[0],
        }
        for name, run in expected.items():
            assert name in classes_of(run), name
        images = torch.ones(2, 8, 4, 4)
        assert "batch norm of few" in classes_of(lambda: nn.BatchNorm2d(8)(images))
        for channels, name in ((128, "batch norm of some"), (192, "batch norm")):
            assert name in classes_of(lambda n=channels: nn.BatchNorm2d(n)(torch.ones(2, n, 2, 2)))
        assert "group norm" in classes_of(lambda: nn.GroupNorm(2, 8)(images))


class TestCurves:
    def test_points_are_exact_and_between_them_powers(self) -> None:
        assert CURVE.seconds(1e-6) == 5e-6
        assert CURVE.seconds(1e-4) == pytest.approx(2e-4, rel=1e-12)
        assert CURVE.seconds(1e-5) == pytest.approx(math.sqrt(5e-6 * 2e-4), rel=1e-12)

    def test_outside_them(self) -> None:
        assert CURVE.seconds(0.0) == CURVE.seconds(1e-9) == 5e-6
        assert CURVE.seconds(3e-4) == pytest.approx(6e-4, rel=1e-12)

    def test_samples_of_one_size_are_one_point(self) -> None:
        samples = [
            KernelSample("b", 2e-6, 4e-6), KernelSample("b", 3e-6, 9e-6), KernelSample("b", 1e-3, 5e-3),
            KernelSample("a", 1.0, 2.0), KernelSample("a", 0.0, 2.0),
        ]  # fmt: skip
        assert fit_curves(samples) == (
            KernelCurve("a", ((1.0, 2.0),)),
            KernelCurve("b", ((2.449e-6, 6e-6), (1e-3, 5e-3))),
        )

    def test_a_smaller_kernel_takes_no_longer(self) -> None:
        (curve,) = fit_curves([KernelSample("a", 1e-6, 9e-6), KernelSample("a", 1e-4, 7e-6)])
        assert curve.points == ((1e-6, 7e-6), (1e-4, 7e-6))

    @pytest.mark.parametrize("points", [(), ((1.0, 0.0),), ((1.0, math.nan),), ((2.0, 1.0), (1.0, 1.0))])
    def test_points_that_make_no_sense(self, points: Any) -> None:
        with pytest.raises(HardwareError, match=r"class 'x': (ideal )?seconds must"):
            KernelCurve("x", points)

    @pytest.mark.parametrize(
        ("known", "asked"),
        [
            ("batch norm backward", "batch norm of few half backward channels last"),
            ("attention half", "attention narrow half"),
            ("layer norm half", "layer norm half strided"),
            ("layer norm", "rms norm half"),
            ("softmax", "log softmax"),
        ],
    )
    def test_a_class_without_samples_is_like_a_wider_one(self, known: str, asked: str) -> None:
        """As in files that were written when there were fewer classes."""
        curve = KernelCurve(known, ((1.0, 2.0),))
        assert replace(HOST, kernels=(curve,)).curve(asked) == curve
        assert replace(HOST, kernels=(curve,)).curve("gather") is None

    def test_files_have_them(self, tmp_path: Path) -> None:
        hardware = replace(HOST, kernels=(CURVE,), host_s=7e-6)
        write_hardware(hardware, tmp_path / "a.json")
        found = read_hardware(tmp_path / "a.json")
        assert found == hardware
        assert found.curve("elementwise") == CURVE
        assert found.curve("copy") is None
        text = (tmp_path / "a.json").read_text().replace("0.0002", '"fast"')
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(HardwareError, match="damaged"):
            read_hardware(tmp_path / "a.json")

    def test_files_have_one_line_for_each(self) -> None:
        named = replace(HOST, name='a "kernels": [] card', kernels=(CURVE, replace(CURVE, name="copy")))
        written = hardware_to_json(named)
        lines = [line.strip(" ,") for line in written.splitlines() if '"points"' in line]
        assert [json.loads(line)["name"] for line in lines] == ["elementwise", "copy"]
        assert json.loads(written)["hardware"]["name"] == named.name


class TestEstimates:
    def test_a_curve_replaces_the_roofline(self) -> None:
        x = torch.ones(500_000)  # with its result, 4 MB: 0.2 ms at 20 GB/s
        hardware = replace(HOST, kernels=(CURVE,), efficiency=0.5)
        assert operation_s(aten.neg.default, (x,), {}, x, hardware) == pytest.approx(4e-4, rel=1e-12)
        assert operation_s(aten.clone.default, (x,), {}, x, hardware) == pytest.approx(4e-4, rel=1e-12)
        faster = replace(hardware, kernels=(replace(CURVE, points=((1e-6, 1.1e-6),)),))
        assert operation_s(aten.neg.default, (x,), {}, x, faster) == pytest.approx(2.2e-4, rel=1e-12)

    def test_the_slower_one_of_host_and_device_sets_the_pace(self) -> None:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        sample = torch.ones(4, 8)
        device = measure(model, sample, loss=torch.sum, hardware=HOST)
        patient, slow = (
            measure(model, sample, loss=torch.sum, hardware=replace(HOST, host_s=host_s))
            for host_s in (1e-7, 1e-3)
        )
        assert patient.plain.seconds == device.plain.seconds
        # Two operations forward. Backward the output's gradient, tanh_backward, two products and a sum; the input of
        # the first unit needs no gradient, which saves a product.
        forwards = [unit.options[0].forward_s for unit in slow.problem.units[:3]]
        backwards = [unit.options[0].backward_s for unit in slow.problem.units[:3]]
        assert forwards == pytest.approx([2e-3] * 3)
        assert backwards == pytest.approx([4e-3, 5e-3, 5e-3])


class TestTheShippedFile:
    def test_it_is_as_the_writer_writes_it(self) -> None:
        path = Path(known.__file__).with_name("h200.json")
        assert path.read_text(encoding="utf-8") == hardware_to_json(read_hardware(path)) + "\n"

    def test_it_was_measured_with_the_published_peaks(self) -> None:
        """A curve goes by seconds at the peak: with other peaks it would be another one."""
        shipped = read_hardware(Path(known.__file__).with_name("h200.json"))
        published = KNOWN["H200"]
        names = [entry.name for entry in fields(Hardware)]
        assert {name for name in names if getattr(shipped, name) != getattr(published, name)} == set()

    @pytest.mark.parametrize("name", KNOWN)
    def test_all_known_gpus_take_its_classes(self, name: str) -> None:
        assert KNOWN[name].kernels == KNOWN["H200"].kernels
        assert KNOWN[name].host_s == KNOWN["H200"].host_s


class TestTimer:
    def test_operations_are_timed_once_and_counted(self) -> None:
        x = torch.rand(64, 64)
        with OperationTimer(make_meter(torch.device("cpu")), HOST) as timer:
            y: Tensor = x @ x
            y = y @ x
            y.add_(1)
            z = y.view(-1)
        assert [sample.kind for sample in timer.samples] == ["matmul float32", "elementwise"]
        assert timer.counts == [2, 1]
        assert timer.samples[0].ideal_s == max(2 * 64**3 / 1e11, 3 * 64 * 64 * 4 / 2e10)
        assert all(sample.measured_s > 0 for sample in timer.samples)
        assert torch.equal(z, ((x @ x) @ x + 1).view(-1)), "timing changed a value that is written in place"

    def test_the_host_has_classes_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("recoup.measuring.estimate.benchmark._NUM_RUNS", 1)
        random = torch.get_rng_state()
        host = measure_hardware("cpu")
        assert torch.equal(torch.get_rng_state(), random)
        names = {curve.name for curve in host.kernels}
        assert {
            "matmul float32",
            "elementwise",
            "layer norm",
            "attention float32 backward",
            "gather",
        } <= names
        assert any(name.startswith("convolution grouped") for name in names)
        assert host.host_s == 0.0
