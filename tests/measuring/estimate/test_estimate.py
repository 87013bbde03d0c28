"""Hardware in numbers: the table, files, measuring the present device, and rooflines by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recoup.budgets import read_budget
from recoup.errors import HardwareError, SampleError, SizeError
from recoup.measuring import Hardware, find_hardware, measure, measure_hardware, read_hardware, write_hardware
from recoup.measuring.estimate import KNOWN, PUBLISHED_EFFICIENCY
from recoup.measuring.estimate.roofline import num_flops, num_moved_bytes, operation_s

# Every figure another one, so that none can stand in for another.
TOY = Hardware(
    name="toy",
    memory_bytes=10_000_000,
    float32_flops_per_s=1e9,
    tf32_flops_per_s=3e9,
    half_flops_per_s=7e9,
    float8_flops_per_s=11e9,
    bandwidth_bytes_per_s=1e6,
    host_link_bytes_per_s=1e5,
    latency_s=1e-5,
    device_type="cpu",
)


def seen(run: Any) -> list[tuple[str, float, int, float]]:
    """Name, flops, bytes and seconds of every operation."""
    found = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            found.append(
                (
                    func._schema.name.removeprefix("aten::"),
                    num_flops(func, args, kwargs, result),
                    num_moved_bytes(func, args, kwargs, result),
                    operation_s(func, args, kwargs, result, TOY),
                )
            )
            return result

    with Seeing():
        run()
    return found


class TestTheTable:
    def test_names_are_found_however_they_are_spelt(self) -> None:
        assert find_hardware("H200") is KNOWN["H200"]
        assert find_hardware("rtx-4090") is KNOWN["RTX 4090"]
        assert find_hardware("a100 40gb") is KNOWN["A100-40GB"]
        assert find_hardware("A100") is KNOWN["A100-80GB"]
        assert find_hardware(TOY) is TOY

    def test_an_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(
            HardwareError, match=r"no hardware 'H900'. Known are B200, H200.*RTX 3090; or a file"
        ):
            find_hardware("H900")
        with pytest.raises(HardwareError, match="written by `recoup hardware`"):
            find_hardware("nowhere.json")

    @pytest.mark.parametrize("name", KNOWN)
    def test_figures_are_plausible(self, name: str) -> None:
        gpu = KNOWN[name]
        assert 2**33 < gpu.memory_bytes < 2**38
        assert gpu.float32_flops_per_s < gpu.half_flops_per_s
        assert not gpu.float8_flops_per_s or gpu.float8_flops_per_s > gpu.half_flops_per_s
        assert gpu.host_link_bytes_per_s < gpu.bandwidth_bytes_per_s
        assert gpu.efficiency == PUBLISHED_EFFICIENCY

    def test_flops_go_by_dtype(self) -> None:
        half = replace(TOY, efficiency=0.5)
        assert TOY.flops_per_s(torch.float32) == 1e9
        assert TOY.flops_per_s(torch.float32, allow_tf32=True) == 3e9
        assert TOY.flops_per_s(torch.bfloat16) == TOY.flops_per_s(torch.float16) == 7e9
        assert TOY.flops_per_s(torch.float8_e4m3fn) == 11e9
        assert TOY.flops_per_s(torch.float64) == 5e8
        assert replace(TOY, tf32_flops_per_s=0.0).flops_per_s(torch.float32, allow_tf32=True) == 1e9
        assert half.flops_per_s(torch.bfloat16) == 3.5e9
        assert half.bytes_per_s == 5e5

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"memory_bytes": 0}, "memory_bytes must be a whole number of bytes above 0; got 0"),
            ({"memory_bytes": 1.5}, "memory_bytes must be a whole number"),
            ({"half_flops_per_s": float("nan")}, "half_flops_per_s must be a finite number"),
            ({"bandwidth_bytes_per_s": -1.0}, "bandwidth_bytes_per_s must be a finite number above 0"),
            ({"efficiency": 1.2}, "efficiency is a share of at most 1"),
            ({"name": ""}, "needs a name"),
            ({"device_type": "tpu"}, "device_type is 'cuda' or 'cpu'"),
        ],
    )
    def test_figures_that_make_no_sense(self, change: dict[str, Any], match: str) -> None:
        with pytest.raises(HardwareError, match=match):
            replace(TOY, **change)


class TestFiles:
    def test_round_trip(self, tmp_path: Path) -> None:
        path = tmp_path / "toy.json"
        write_hardware(TOY, path)
        assert read_hardware(path) == find_hardware(path) == find_hardware(str(path)) == TOY

    def test_damaged_files(self, tmp_path: Path) -> None:
        path = tmp_path / "toy.json"
        with pytest.raises(HardwareError, match=r"Cannot read .*No such file"):
            read_hardware(path)
        path.write_text("{")
        with pytest.raises(HardwareError, match="is not JSON"):
            read_hardware(path)
        path.write_text("[]")
        with pytest.raises(HardwareError, match="no file written by `recoup hardware`"):
            read_hardware(path)
        write_hardware(TOY, path)
        document = json.loads(path.read_text())
        path.write_text(json.dumps({**document, "version": 9}))
        with pytest.raises(HardwareError, match="version 9 of the format; this recoup reads version 1"):
            read_hardware(path)
        del document["hardware"]["latency_s"]
        path.write_text(json.dumps(document))
        with pytest.raises(HardwareError, match=r"damaged: .*latency_s"):
            read_hardware(path)


class TestTheRoofline:
    def test_a_product_is_bound_by_its_flops(self) -> None:
        left, right = torch.ones(300, 500), torch.ones(500, 400)
        flops, moved = 2 * 300 * 500 * 400, 4 * (300 * 500 + 500 * 400 + 300 * 400)
        fast_memory = replace(TOY, bandwidth_bytes_per_s=1e12)
        [(name, *figures, seconds)] = seen(lambda: left @ right)
        assert (name, figures, seconds) == ("mm", [flops, moved], moved / 1e6)
        out = left @ right
        func = torch.ops.aten.mm.default
        assert operation_s(func, (left, right), {}, out, fast_memory) == flops / 1e9

    def test_a_sum_is_bound_by_its_bytes(self) -> None:
        x, y = torch.ones(100, 10), torch.ones(10)
        moved = 4 * (1000 + 10 + 1000)
        assert seen(lambda: x + y) == [("add", 0.0, moved, moved / 1e6)]

    def test_a_small_operation_is_bound_by_its_start(self) -> None:
        x = torch.ones(1)
        assert seen(lambda: x + x) == [("add", 0.0, 12, 12 / 1e6)]
        fast = replace(TOY, bandwidth_bytes_per_s=1e12)
        assert operation_s(torch.ops.aten.add.Tensor, (x, x), {}, x, fast) == 1e-5

    def test_views_and_empty_tensors_are_free(self) -> None:
        x = torch.ones(8, 4)
        found = seen(lambda: (x.view(4, 8), x.t(), x[1:], x.detach(), torch.empty(9), x.expand(2, 8, 4)))
        assert {seconds for *_, seconds in found} == {0.0}

    def test_what_is_expanded_is_read_once(self) -> None:
        x = torch.ones(1).expand(1000)
        assert seen(lambda: x.clone())[0][2] == 4 + 4000

    def test_a_lookup_reads_what_it_returns(self) -> None:
        table, rows = torch.ones(10_000, 8), torch.arange(3)
        [(name, _, moved, _)] = seen(lambda: F.embedding(rows, table))
        assert (name, moved) == ("embedding", 3 * 8 + 2 * 3 * 8 * 4)

    def test_a_copy_does_not_read_its_target(self) -> None:
        x, y = torch.ones(50), torch.ones(50)
        assert seen(lambda: x.copy_(y))[0][2] == 400
        assert seen(lambda: x.zero_())[0][2] == 200

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_attention(self, is_causal: bool) -> None:
        q, k, v = (torch.ones(2, 3, n, 16, requires_grad=True) for n in (10, 20, 20))
        pairs = 2 * 3 * 10 * 20 / (2 if is_causal else 1)

        def run() -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).sum().backward()

        flops = [entry[1] for entry in seen(run) if "attention" in entry[0]]
        assert flops == [pairs * 2 * 32, 2.5 * pairs * 2 * 32]

    def test_convolutions_count(self) -> None:
        layer = nn.Conv2d(3, 5, 3, bias=False)
        [(name, flops, *_)] = [entry for entry in seen(lambda: layer(torch.ones(2, 3, 9, 9))) if entry[1]]
        assert (name, flops) == ("convolution", 2 * 2 * 5 * 7 * 7 * 3 * 9)


class TestMeasuringTheDevice:
    def test_the_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("recoup.measuring.estimate.benchmark._NUM_RUNS", 1)
        host = measure_hardware("cpu")
        assert (host.name, host.device_type, host.rounding_bytes, host.efficiency) == ("CPU", "cpu", 1, 1.0)
        assert host.memory_bytes > 2**28
        assert 1e8 < host.float32_flops_per_s < 1e14
        assert 1e7 < host.bandwidth_bytes_per_s < 1e13
        assert 1e-8 < host.latency_s < 1e-2

    def test_a_device_that_is_not_there(self) -> None:
        with pytest.raises(HardwareError, match="no device 'mps' here"):
            measure_hardware("mps")

    @pytest.mark.gpu
    def test_the_gpu(self) -> None:
        gpu = measure_hardware()
        assert gpu.device_type == "cuda"
        assert gpu.rounding_bytes == 512
        assert gpu.half_flops_per_s > gpu.tf32_flops_per_s > gpu.float32_flops_per_s > 1e12
        assert gpu.bandwidth_bytes_per_s > 1e11
        assert 1e-7 < gpu.latency_s < 1e-4


class TestBudgets:
    def test_shares_are_of_the_hardware(self) -> None:
        model = nn.Linear(2, 2)
        assert read_budget("80%", model, memory_bytes=TOY.memory_bytes) == 8_000_000
        assert read_budget("auto", model, memory_bytes=TOY.memory_bytes) == 9_200_000
        assert read_budget("4MB", model, memory_bytes=TOY.memory_bytes) == 4_000_000
        with pytest.raises(SizeError, match="at most at 100 %"):
            read_budget("101%", model, memory_bytes=TOY.memory_bytes)

    def test_ranks_are_whole_and_go_with_hardware(self) -> None:
        model, sample = nn.Linear(2, 1), torch.ones(3, 2)
        with pytest.raises(SampleError, match="ranks=4 goes with hardware="):
            measure(model, sample, loss=torch.sum, ranks=4)
        with pytest.raises(SampleError, match="ranks must be a whole number of at least 1; got 0"):
            measure(model, sample, loss=torch.sum, hardware=TOY, ranks=0)
