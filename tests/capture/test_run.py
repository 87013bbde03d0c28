"""One compilation for each kind and cut; what cannot be captured; both engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import networkx
import pytest
import torch
from capture.blocks import RANDOM, Attention, FeedForward, RandnLike, StochasticDepth, TwoDropouts, Unit
from capture.cuts import Operations, assert_equal, at, captured, cuts, held_bytes, recomputed, step
from slowly import slow_but
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import recoup.capture.run
from recoup.capture.cut import Cut
from recoup.capture.run import capture, graph_of
from recoup.checkpointing import Checkpoint
from recoup.errors import CaptureError, RecoupWarning
from recoup.measuring import MemoryTracker

pytestmark = [
    # The compiler looks at the gradients of what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"),
    # Its code generator imports what torch itself calls deprecated.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    recoup.capture.run._functions.clear()
    torch._dynamo.reset()
    yield
    recoup.capture.run._functions.clear()
    torch._dynamo.reset()


@pytest.fixture
def compiled_cuts(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How often each cut was compiled, by what it saves."""
    counts: Counter[Any] = Counter()
    original = recoup.capture.run.partition

    def partition(cut: Cut, *args: Any, **kwargs: Any) -> Any:
        counts[cut.saves] += 1
        return original(cut, *args, **kwargs)

    monkeypatch.setattr(recoup.capture.run, "partition", partition)
    return counts


def train_at(module: nn.Module, cut: Cut, x: Tensor) -> None:
    at(module, cut)(x.clone().requires_grad_()).sum().backward()


class TestCompilations:
    def test_one_for_all_units_of_a_kind(self, compiled_cuts: Counter[Any]) -> None:
        modules = [FeedForward() for _ in range(5)]
        graph = captured(modules[0], modules[0].given())
        assert compiled_cuts == {None: 1}
        own, cut = Cut("captured", graph.digest), Cut("captured", graph.digest, ("addmm",))
        for _ in range(2):
            for module in modules:
                train_at(module, own, torch.randn(4, 8))
                train_at(module, cut, torch.randn(4, 8))
        assert compiled_cuts == {None: 1, ("addmm",): 1}

    def test_cuts_do_not_take_turns(self, compiled_cuts: Counter[Any]) -> None:
        module = FeedForward()
        graph = captured(module, module.given())
        every = [
            Cut("captured", graph.digest, saves) for saves in ((), ("addmm",), ("gelu",), ("addmm", "gelu"))
        ]
        for _ in range(3):
            for cut in every:
                train_at(module, cut, torch.randn(4, 8))
        assert [compiled_cuts[cut.saves] for cut in every] == [1, 1, 1, 1]

    def test_smaller_batches_and_shorter_sequences_need_one_more(self, compiled_cuts: Counter[Any]) -> None:
        module = FeedForward()
        args = (torch.randn(6, 5, 8, requires_grad=True),)
        cut = Cut("captured", captured(module, (args, {})).digest, ("addmm",))
        expected = {}
        shapes = [(6, 5), (4, 5), (3, 5), (5, 5), (2, 5), (4, 4), (3, 3), (2, 2), (6, 5)]
        for shape in shapes:
            given = (torch.randn(*shape, 8, requires_grad=True),), {}
            expected = step(module, module.forward, given)
            assert_equal(step(module, at(module, cut), given), expected, cut)
        # The sample's; then a symbolic batch; then a symbolic sequence.
        assert compiled_cuts[("addmm",)] <= 3
        before = compiled_cuts[("addmm",)]
        for rows in (7, 9, 11):
            train_at(module, cut, torch.randn(rows, 4, 8))
        assert compiled_cuts[("addmm",)] == before

    def test_a_function_with_dropout_in_other_sizes_draws_once(self) -> None:
        module = TwoDropouts()
        cut = Cut("captured", captured(module, module.given()).digest, ())
        for rows in (4, 3, 2, 5):
            given = (torch.randn(rows, 8, requires_grad=True),), {}
            assert_equal(step(module, at(module, cut), given), step(module, module.forward, given), cut)

    def test_layers_that_differ_in_a_number(self) -> None:
        """Each is compiled for itself, beyond the number of times that the compiler's settings allow."""

        class Numbered(Unit):
            def __init__(self, index: int) -> None:
                super().__init__()
                self.index = index

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(self.a(x)) * self.index

        layers = [Numbered(index) for index in range(1, 11)]
        given = layers[0].given()
        cut = Cut("captured", captured(layers[0], given).digest, ())
        for layer in layers:
            assert_equal(step(layer, at(layer, cut), given), step(layer, layer.forward, given), cut)

    def test_the_engine_s_own_cut_in_other_sizes(self) -> None:
        module = FeedForward()
        cut = Cut("captured", captured(module, module.given()).digest)
        for batch in (5, 6):
            given = ((torch.randn(batch, 8, requires_grad=True),), {})
            assert_equal(step(module, at(module, cut), given), step(module, module.forward, given), cut)

    @pytest.mark.parametrize("engine", slow_but(["captured"], ["captured", "compiled"]))
    def test_a_cut_keeps_the_same_results_in_other_sizes(
        self, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Symbolic sizes are further nodes of the graph, which must not change what a name stands for."""
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing that was compiled before
        module = nn.Sequential(nn.Linear(8, 32), nn.GELU())
        graph = captured(module, ((torch.randn(32, 5, 8, requires_grad=True),), {}), engine)
        names = graph.names(graph.needed)
        cut = Cut(engine, graph.digest, (names[len(names) // 2],))
        found = {}
        for rows in (32, 24, 16):
            given = (torch.randn(rows, 5, 8, requires_grad=True),), {}
            found[rows] = held_bytes(at(module, cut), given)
        assert found[32] > 0
        assert {rows: 32 * size for rows, size in found.items()} == {rows: rows * found[32] for rows in found}

    def test_train_and_eval(self, compiled_cuts: Counter[Any]) -> None:
        class Dropping(Unit):
            def forward(self, x: Tensor) -> Tensor:
                return self.b(nn.functional.dropout(torch.tanh(self.a(x)), 0.5, self.training))

        module = Dropping()
        given = module.given()
        cut = Cut("captured", captured(module, given).digest, ())
        for _ in range(2):
            for mode in (True, False):
                module.train(mode)
                expected = step(module, module.forward, given)
                assert_equal(step(module, at(module, cut), given), expected, cut)
        assert compiled_cuts[()] == 2

    def test_autocast(self) -> None:
        module = FeedForward()
        given = module.given()
        graph = captured(module, given)
        cut = Cut("captured", graph.digest, ())
        for is_on in (False, True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                assert at(module, cut)(*given[0]).dtype == module(*given[0]).dtype
                expected = step(module, module.forward, given)
                assert_equal(step(module, at(module, cut), given), expected, cut)

    def test_without_gradients(self) -> None:
        module = FeedForward()
        given = module.given()
        cut = Cut("captured", captured(module, given).digest, ())
        with torch.no_grad():
            assert torch.equal(at(module, cut)(*given[0]), module(*given[0]))


class TestNested:
    @pytest.mark.parametrize("kind", [FeedForward, TwoDropouts, Attention])
    def test_a_checkpoint_around_a_captured_call(self, kind: Any) -> None:
        module = kind()
        given = module.given()
        graph = captured(module, given)
        for saves in (None, ()):
            cut = Cut("captured", graph.digest, saves)
            checkpointed = Checkpoint()(at(module, cut))
            assert_equal(step(module, checkpointed, given), step(module, module.forward, given), cut)

    def test_it_holds_nothing(self) -> None:
        module = FeedForward()
        given = module.given()
        assert (
            held_bytes(Checkpoint()(at(module, Cut("captured", captured(module, given).digest))), given) == 0
        )

    def test_its_replay_runs_each_operation_once_more(self) -> None:
        module = FeedForward()
        given = module.given()
        own = at(module, Cut("captured", captured(module, given).digest))
        found = recomputed(Checkpoint()(own), given, own)
        assert {name: found[name] for name in ("native_layer_norm", "addmm", "gelu")} == {
            "native_layer_norm": 1,
            "addmm": 2,
            "gelu": 1,
        }


@torch.library.custom_op("recoup_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """A copy, which has other strides than its fake has if there are six rows."""
    return x.t().clone(memory_format=torch.contiguous_format).t() if len(x) == 6 else x.clone()


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


turned.register_autograd(lambda ctx, gradient: gradient)


class Turning(Unit):
    """The compiler takes the reshape for a view; with six rows it is a copy."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(turned(self.a(x)).reshape(-1))


def turned_off() -> Any:
    return torch._dynamo.config.patch(disable=True)


class TestWhatCannotBeCaptured:
    def test_a_graph_break(self) -> None:
        class Breaking(Unit):
            def forward(self, x: Tensor) -> Tensor:
                y = self.a(x)
                torch._dynamo.graph_break()
                return torch.tanh(y)

        module = Breaking()
        with pytest.raises(CaptureError, match="graph_break"):
            captured(module, module.given())

    def test_the_line_of_the_user_is_named(self) -> None:
        def shown(x: Tensor) -> Tensor:
            print(x)
            return x

        class Showing(Unit):
            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(nn.Sequential(self.a)(shown(x)))

        module, line = Showing(), shown.__code__.co_firstlineno + 1
        with pytest.raises(CaptureError, match=rf"cannot capture it \(.*, test_run\.py:{line}\)"):
            captured(module, module.given())

    def test_control_flow_that_depends_on_values(self) -> None:
        class Choosing(Unit):
            def forward(self, x: Tensor) -> Tensor:
                return self.a(x) if x.sum() > 0 else self.b(x)

        module = Choosing()
        with pytest.raises(CaptureError, match=r"[Dd]ata-dependent"):
            captured(module, module.given())

    def test_numbers_that_every_call_changes(self) -> None:
        class Counting(Unit):
            num_calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.num_calls += 1
                return torch.tanh(self.a(x))

        module = Counting()
        with pytest.raises(CaptureError, match=r"compiled anew in every call.*count in a buffer"):
            captured(module, module.given())

    def test_what_the_first_call_leaves_behind_is_no_obstacle(self) -> None:
        class Remembering(Unit):
            scale: float | None = None

            def forward(self, x: Tensor) -> Tensor:
                if self.scale is None:
                    self.scale = x.shape[-1] ** 0.5
                return torch.tanh(self.a(x) / self.scale)

        module = Remembering()
        given = module.given()
        cut = Cut("captured", captured(module, given).digest, ())
        assert_equal(step(module, at(module, cut), given), step(module, module.forward, given), cut)

    @pytest.mark.parametrize("is_off", [partial(torch.compiler.set_stance, "force_eager"), turned_off])
    def test_a_compiler_that_is_off(self, is_off: Any) -> None:
        """Torch would run the unit's own code in silence, and keep all that its backward reads."""
        module = FeedForward()
        given = module.given()
        cut = Cut("captured", captured(module, given).digest, ())
        expected = step(module, module.forward, given)
        with is_off():
            with pytest.raises(CaptureError, match="compiler is off here"):
                captured(FeedForward(), given)
            with pytest.warns(RecoupWarning, match=r"class FeedForward runs eagerly.*compiler is off here"):
                ours = step(module, at(module, cut), given)
        assert_equal(ours, expected, cut)

    def test_nothing_to_train(self) -> None:
        module = FeedForward().requires_grad_(False)
        with pytest.raises(CaptureError, match="nothing in it needs a gradient"):
            capture("captured", module.forward, (torch.randn(4, 8),), {})

    def test_an_error_of_the_user_s_own_is_named(self) -> None:
        class Wrong(Unit):
            def forward(self, x: Tensor) -> Tensor:
                return self.a(x[:, :5])

        module = Wrong()
        with pytest.raises(Exception, match=r"(?i)shape|size|fake tensor"):
            captured(module, module.given())

    def test_a_call_unlike_the_captured_one_runs_eagerly(self) -> None:
        class Sometimes(Unit):
            def forward(self, x: Tensor, *, is_odd: bool = False) -> Tensor:
                y = torch.tanh(self.a(x))
                if is_odd and y.sum() > 1e9:
                    return y
                return self.b(y)

        module = Sometimes()
        given = module.given()
        cut = Cut("captured", captured(module, given).digest, ())
        odd = (given[0], {"is_odd": True})
        expected = step(module, module.forward, odd)
        with pytest.warns(
            RecoupWarning, match=r"class Sometimes runs eagerly.*compiler cannot capture it \("
        ):
            ours = step(module, at(module, cut), odd)
        assert_equal(ours, expected, cut)
        assert_equal(step(module, at(module, cut), given), step(module, module.forward, given), cut)

    def test_a_graph_that_does_not_run(self) -> None:
        module = Turning()
        with pytest.raises(CaptureError, match=r"its graph does not run \(view size is not compatible"):
            captured(module, ((torch.randn(6, 8, requires_grad=True),), {}))

    def test_a_call_whose_graph_does_not_run(self) -> None:
        module = Turning()
        cut = Cut("captured", captured(module, module.given()).digest, ())
        given = ((torch.randn(6, 8, requires_grad=True),), {})
        expected = step(module, module.forward, given)
        with pytest.warns(
            RecoupWarning, match=r"class Turning runs eagerly.*its graph does not run \(view size"
        ):
            ours = step(module, at(module, cut), given)
        assert_equal(ours, expected, cut)

    def test_an_error_of_the_user_s_own_is_raised_as_it_is(self) -> None:
        class Looking(Unit):
            def forward(self, x: Tensor, index: Tensor) -> Tensor:
                return torch.tanh(self.a(x))[index]

        module, x = Looking(), torch.randn(4, 8, requires_grad=True)
        cut = Cut("captured", captured(module, ((x, torch.tensor([1, 3])), {})).digest, ())
        with (
            pytest.warns(RecoupWarning, match="class Looking runs eagerly"),
            pytest.raises(IndexError, match="index 4 is out of bounds") as caught,
        ):
            at(module, cut)(x, torch.tensor([1, 4]))
        assert caught.value.__context__ is None
        assert caught.traceback[-1].name == "forward"

    def test_memory_that_runs_out_is_no_reason_to_run_eagerly(self) -> None:
        module = FeedForward()
        args, _ = module.given()
        cut = Cut("captured", captured(module, module.given()).digest, ())
        run = at(module, cut)
        run(*args)  # nothing is compiled while bytes are counted
        with (
            MemoryTracker(limit_bytes=4 * 8 * 4),
            pytest.raises(torch.OutOfMemoryError, match="the limit is"),
        ):
            run(*args)

    def test_under_a_counter_of_flops(self) -> None:
        """Nothing compiled runs under a mode of others: the unit runs eagerly, and every operation is counted."""
        module = FeedForward()
        given = module.given()
        cut = Cut("captured", captured(module, given).digest, ())
        counts = []
        for run in (module.forward, at(module, cut)):
            with FlopCounterMode(display=False) as counter:
                step(module, run, given)
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0

    def test_a_graph_of_another_process(self) -> None:
        assert graph_of(Cut("captured", "of another process")) is None
        module = FeedForward()
        given = module.given()
        cut = Cut("captured", "of another process", ("addmm",))
        assert_equal(step(module, at(module, cut), given), step(module, module.forward, given), cut)


class Gated(Unit):
    """Its backward, as generated code, writes into what the forward saved."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.nn.functional.silu(self.a(x)) * self.b(x)).view(2, 2, 8)


class TestRetainedGraphs:
    def make(self, engine: str, saves: tuple[str, ...] | None) -> tuple[nn.Module, Any, Tensor, Any]:
        module = Gated()
        (x,), _ = given = module.given()
        run = at(module, Cut(engine, captured(module, given, engine).digest, saves))
        run(x).sum().backward()  # compiles the backward, for graphs that are not retained
        x.grad = None
        return module, run, x, [x, *module.parameters()]

    @pytest.mark.parametrize("engine", ["captured", "compiled"])
    @pytest.mark.parametrize("saves", [None, ()])
    def test_every_backward_finds_what_the_forward_saved(self, engine: str, saves: Any) -> None:
        _, run, x, trained = self.make(engine, saves)
        expected = torch.autograd.grad(run(x).square().sum(), trained)
        loss = run(x).square().sum()
        for retains in (True, True, False):
            found = torch.autograd.grad(loss, trained, retain_graph=retains)
            assert all(map(torch.equal, found, expected))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, trained)

    def test_a_graph_that_is_not_retained_takes_no_copies(self) -> None:
        _, run, x, trained = self.make("compiled", None)
        peaks = []
        for retains in (False, True):
            loss = run(x).sum()
            with MemoryTracker() as memory:
                torch.autograd.grad(loss, trained, retain_graph=retains)
            peaks.append(memory.peak_bytes)
        assert peaks[0] < peaks[1]

    @pytest.mark.parametrize("engine", ["captured", "compiled"])
    def test_a_backward_through_gradients(self, engine: str) -> None:
        _, run, x, trained = self.make(engine, None)
        gradients = torch.autograd.grad(run(x).square().sum(), trained, create_graph=True)
        assert all(map(torch.equal, gradients, torch.autograd.grad(run(x).square().sum(), trained)))
        with pytest.raises(CaptureError, match=r"create_graph=True.*engine='eager'"):
            gradients[0].sum().backward()


class Tiny(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.sin(self.a(x))))


class TestCompiled:
    """Generated code takes seconds to compile: a handful of cases."""

    @pytest.mark.parametrize(
        "kind", slow_but([TwoDropouts], [Tiny, TwoDropouts, StochasticDepth, RandnLike, Attention])
    )
    def test_cuts_are_bit_equal_to_the_engine_s_own(self, kind: Any) -> None:
        module = kind()
        given = module.given()
        graph = captured(module, given, "compiled")
        own = Cut("compiled", graph.digest)
        expected = step(module, at(module, own), given)
        names = tuple(node.name for node in graph.makers if node.op != "placeholder")
        for saves in ((), names):
            cut = Cut("compiled", graph.digest, saves)
            assert_equal(step(module, at(module, cut), given), expected, cut)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", RANDOM)
    def test_every_cut_is_bit_equal_to_the_engine_s_own(self, kind: Any) -> None:
        module = kind()
        given = module.given()
        graph = captured(module, given, "compiled")
        own, *others = cuts(graph, each=True, engine="compiled")
        expected = step(module, at(module, own), given)
        for cut in others:
            assert_equal(step(module, at(module, cut), given), expected, cut)

    def test_close_to_eager_and_generated(self) -> None:
        module = Tiny()
        given = module.given()
        own = at(module, Cut("compiled", captured(module, given, "compiled").digest))
        eager, ours = step(module, module.forward, given), step(module, own, given)
        for name, value in eager.items():
            assert torch.allclose(ours[name].float(), value.float(), rtol=1e-4, atol=1e-6), name
        with Operations() as operations:
            own(*given[0])
        assert not {"sin", "tanh"} & set(operations.counts)  # fused

    def test_bytes_of_generated_code(self) -> None:
        module = Tiny()
        given = module.given()
        graph = captured(module, given, "compiled")
        one = 4 * 8 * 4
        assert held_bytes(at(module, Cut("compiled", graph.digest, ())), given) == 0
        assert held_bytes(at(module, Cut("compiled", graph.digest, ("addmm",))), given) == one


def test_a_cut_that_torch_refuses_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise networkx.NetworkXUnbounded("no cut")

    module = FeedForward()
    given = module.given()
    cut = Cut("captured", captured(module, given).digest, ("addmm",))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(networkx, "minimum_cut", refuse)
    with pytest.warns(RecoupWarning, match="runs eagerly"):
        step(module, at(module, cut), given)
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
    import json, sys
    import torch
    from torch import nn
    from torch._dynamo.utils import counters
    from recoup.capture.cut import Cut
    from recoup.capture.run import capture, run_cut

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return torch.tanh(self.b(torch.sin(self.a(x))))

    torch.manual_seed(0)
    module, x = Unit(), torch.randn(4, 8, requires_grad=True)
    graph = capture("compiled", module.forward, (x,), {})
    missed, held = [], []
    for saves in json.loads(sys.argv[1]):
        cut = Cut("compiled", graph.digest, tuple(saves))
        output = run_cut(cut, module.forward, (x,), {})
        held.append(sorted(list(one.shape) for one in output.grad_fn.saved_tensors))
        output.sum().backward()
        missed.append(counters["inductor"]["fxgraph_cache_miss"])
    print(json.dumps([missed, held]))
"""


class TestCaches:
    def run(self, folder: Path, *saves: tuple[str, ...]) -> tuple[list[int], list[Any]]:
        """After each cut, the number of graphs that no cache had; and the shapes that each cut holds."""
        found = subprocess.run(
            [sys.executable, "-c", dedent(PROGRAM), json.dumps(saves)],
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(folder),
                "PYTHONPATH": str(Path(recoup.__file__).parent.parent),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
        )
        missed, held = json.loads(found.stdout.splitlines()[-1])
        return missed, held

    def test_the_same_plan_compiles_nothing_anew_and_another_one_runs_as_planned(
        self, tmp_path: Path
    ) -> None:
        missed, (nothing,) = self.run(tmp_path, ())
        assert missed[0] > 0
        # In a second process, with the same folder; then another plan for the same graph, which the cache lacks.
        missed, (same, other) = self.run(tmp_path, (), ("addmm",))
        assert missed[0] == 0
        assert same == nothing
        assert missed[1] > 0
        assert other.count([4, 8]) == same.count([4, 8]) + 1
