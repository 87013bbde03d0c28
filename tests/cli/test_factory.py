"""Factories that cannot be used are refused in one line, by every command that takes one."""

from __future__ import annotations

import pytest
import torch

from recoup.cli import main
from recoup.cli.factory import load_factory

COMMANDS = ["fit --budget 1MB", "frontier", "audit", "measure --json profile.json"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such:make", "Cannot import 'no_such': ModuleNotFoundError: No module named 'no_such'"),
        ("broken:make", "Cannot import 'broken': ModuleNotFoundError: No module named 'no_such_package'"),
        ("leaving:make", "Cannot import 'leaving': SystemExit: not as a module"),
        ("factories:mkae", "Module 'factories' has no 'mkae'; it has block, model, loss, make,"),
        ("factories:number", "factories:number is a int and not a function that makes a model"),
        ("factories:ready", "factories:ready is a Sequential and not a function that makes a model"),
        ("factories:raises", "factories:raises raised OSError: no such weights: weights.pt"),
        ("factories:only_a_model", "factories:only_a_model returned a Sequential. It should return (model,"),
        ("factories:five", "factories:five returned 5 things. It should return (model, sample)"),
        ("factories:no_model", "returned a str as model, not a torch.nn.Module"),
        ("factories:odd_names", "returned a dict with net, sample. It should return"),
        ("factories:optimizer_as_loss", "returned a SGD as loss, not a function"),
        (
            "factories:loss_as_optimizer",
            "returned a function as optimizer, not a torch.optim.Optimizer or a list",
        ),
        ("factories:sized", "factories:sized takes an argument, the batch size; give --batch"),
        ("factories:wrong_sample", "Sequential refuses the sample (float32[64, 7])"),
        ("factories:no_scalar", "The loss must be a scalar"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    command: str, spec: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = command.split()
    assert main([name, spec, *rest]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("recoup: ")
    assert err.count("\n") == 1
    assert message in err


def test_debug_shows_where_it_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "factories:raises", "--debug"]) == 2
    err = capsys.readouterr().err
    assert 'in raises\n    raise OSError("no such weights' in err
    assert err.endswith("\nrecoup: factories:raises raised OSError: no such weights: weights.pt\n")


def test_a_batch_size_for_a_factory_that_takes_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "factories:make", "--batch", "4"]) == 2
    assert "factories:make takes no batch size; leave out --batch" in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["make", "by_name", "with_optimizer", "sized_by_default", "Models.make"])
def test_what_factories_may_return(spec: str) -> None:
    made = load_factory(f"factories:{spec}").build()
    assert isinstance(made.model, torch.nn.Sequential)
    assert made.sample.shape == (64, 32)
    assert made.loss is not None
    assert (made.optimizer is None) == (spec != "with_optimizer")


def test_a_loaders_batch_and_several_optimizers_are_handed_on() -> None:
    made = load_factory("factories:loader_batch").build()
    inputs, targets = made.sample
    assert (inputs.shape, targets.shape, type(made.loss)) == ((64, 32), (64, 32), torch.nn.MSELoss)
    optimizers = load_factory("factories:several_optimizers").build().optimizer
    assert [type(optimizer) for optimizer in optimizers] == [torch.optim.AdamW] * 2


def test_batch_sizes_are_handed_over() -> None:
    factory = load_factory("factories:sized_by_default")
    assert factory.takes_batch
    assert not factory.needs_batch
    assert factory.build(3).sample.shape == (3, 32)
    assert load_factory("factories:sized").needs_batch


def test_unallocated_models_have_no_memory() -> None:
    made = load_factory("factories:with_optimizer").build(unallocated=True)
    assert {parameter.device.type for parameter in made.model.parameters()} == {"meta"}
    assert made.sample.device.type == "meta"
