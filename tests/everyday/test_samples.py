"""Samples and losses as people have them, and what is said of those that cannot be used."""

from __future__ import annotations

import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from everyday.subjects import Classifier, examples, gpt2, loss_of_examples, peak_bytes, tokens, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

import recoup
from recoup.engines import is_applied
from recoup.errors import LossError, SampleError


def fitted(model: nn.Module, sample: Any, **options: Any) -> recoup.Fitted:
    budget = 5 * recoup.measure(model, sample, **options).plain_bytes // 6
    found = recoup.fit(model, sample, budget=budget, **options)
    assert is_applied(model)
    assert found.verification.gradients == "bit-equal"
    assert found.verification.peak_bytes <= budget
    return found


# (inputs, targets)


def test_a_batch_of_a_loader_with_a_loss_module() -> None:
    """The loop of torch's tutorial, before and after `fit`: the same losses, and the peak under the budget."""

    def run(is_fitted: bool) -> tuple[list[float], int]:
        torch.manual_seed(0)
        loader = DataLoader(TensorDataset(*examples(512)), batch_size=128)
        model, criterion = Classifier(), nn.CrossEntropyLoss()
        optimizer = torch.optim.AdamW(model.parameters())
        if is_fitted:
            recoup.fit(model, next(iter(loader)), budget=budget, loss=criterion, optimizer=optimizer)
            assert is_applied(model)
        batches, losses = list(loader), []

        def loop() -> None:
            for x, y in batches:
                output = model(x)
                loss = criterion(output, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

        torch.manual_seed(1)
        return losses, peak_bytes(loop, model, batches[0])

    losses, plain_bytes = run(is_fitted=False)
    budget = 3 * plain_bytes // 4
    fitted_losses, fitted_bytes = run(is_fitted=True)
    assert fitted_losses == losses
    assert fitted_bytes <= budget < plain_bytes


@pytest.mark.parametrize("pack", [tuple, list, lambda pair: namedtuple("Batch", "x y")(*pair)])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.arange(1.0, 11.0)),
        F.cross_entropy,
        lambda output, targets: F.cross_entropy(output, targets),
    ],
    ids=["module", "weighted", "function", "lambda"],
)
def test_pairs_and_losses_of_two_arguments(pack: Callable[[Any], Any], loss: Any) -> None:
    fitted(Classifier(), pack(examples()), loss=loss)


class Attended(Classifier):
    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x * mask[:, None] * scale)


@pytest.mark.parametrize(
    "inputs_of",
    [
        lambda x, mask: (x, mask),
        lambda x, mask: [x, mask],
        lambda x, mask: {"x": x, "mask": mask, "scale": 0.5},
    ],
    ids=["tuple", "list", "dict"],
)
def test_inputs_of_a_pair_may_be_arguments_themselves(inputs_of: Callable[..., Any]) -> None:
    x, y = examples()
    fitted(Attended(), (inputs_of(x, torch.ones(len(x))), y), loss=nn.CrossEntropyLoss())


def test_targets_may_be_a_dict() -> None:
    x, y = examples()
    fitted(
        Classifier(),
        (x, {"classes": y}),
        loss=lambda output, targets: F.cross_entropy(output, targets["classes"]),
    )


def test_a_tuple_with_a_loss_of_one_argument_is_the_model_s_arguments() -> None:
    x, y = examples()
    fitted(Attended(), (x, torch.ones(len(x))), loss=lambda output: F.cross_entropy(output, y))


def test_optional_arguments_of_a_loss_do_not_count() -> None:
    x, y = examples()

    def loss(output: Tensor, weight: float = 2.0) -> Tensor:
        return weight * F.cross_entropy(output, y)

    fitted(Attended(), (x, torch.ones(len(x))), loss=loss)


def test_a_loss_with_parameters_of_its_own() -> None:
    """They are trained beside the model, and are as before when `fit` returns."""

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(output / self.temperature, targets)

    model, loss = Classifier(), Learned()
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    fitted(model, examples(), loss=loss, optimizer=optimizer)
    assert loss.temperature.item() == 1
    assert loss.temperature.grad is None
    assert not optimizer.state


def test_a_loss_that_keeps_count_is_as_before() -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_calls, self.seen = 0, []
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, output: Tensor, targets: Tensor) -> Tensor:
            loss = F.cross_entropy(output, targets)
            self.num_calls += 1
            self.seen.append(loss.item())
            self.mean += loss.detach()
            return loss

    loss = Averaged()
    fitted(Classifier(), examples(), loss=loss)
    assert (loss.num_calls, loss.seen, loss.mean.item()) == (0, [], 0)


# Mappings


@pytest.mark.parametrize(
    "pack", [dict, BatchEncoding, OrderedDict], ids=["dict", "BatchEncoding", "OrderedDict"]
)
def test_a_mapping_is_the_model_s_keyword_arguments(pack: Callable[[Any], Any]) -> None:
    fitted(gpt2(), pack(tokens()))


def test_a_mapping_with_a_loss_of_the_output() -> None:
    batch = tokens()
    labels = batch.pop("labels")
    fitted(gpt2(), batch, loss=lambda output: F.cross_entropy(output.logits.flatten(0, 1), labels.flatten()))


def test_a_pair_of_a_mapping_and_labels() -> None:
    batch = BatchEncoding(tokens())
    labels = batch.pop("labels")
    fitted(
        gpt2(),
        (batch, labels),
        loss=lambda output, labels: F.cross_entropy(output.logits.flatten(0, 1), labels.flatten()),
    )


# Outputs


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


@pytest.mark.parametrize("form", ["tuple", "dict", "dataclass", "list"])
def test_outputs_of_every_form(form: str) -> None:
    forms: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]] = {
        "tuple": (lambda logits, x: (logits, x), lambda output: output[0]),
        "list": (lambda logits, x: [logits, x], lambda output: output[0]),
        "dict": (lambda logits, x: {"logits": logits, "x": x}, lambda output: output["logits"]),
        "dataclass": (Output, lambda output: output.logits),
    }
    pack, unpack = forms[form]

    class Packing(Classifier):
        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = block(x)
            return pack(self.head(x), x)

    fitted(Packing(), examples(), loss=lambda output, targets: F.cross_entropy(unpack(output), targets))


def test_a_tuple_of_loss_and_logits() -> None:
    """transformers' models return it with ``return_dict=False``."""
    fitted(gpt2(), tokens() | {"return_dict": False}, loss=lambda output: output[0])


# What cannot be used: the real cause, and a remedy that exists


def test_a_loss_of_two_arguments_without_targets() -> None:
    x, _ = examples()
    with pytest.raises(SampleError, match=r"loss= requires 2 arguments, .*\(inputs, targets\)"):
        recoup.fit(Classifier(), x, budget="1GiB", loss=nn.CrossEntropyLoss())


def test_a_pair_without_a_loss() -> None:
    """The model would be called with two arguments: the message says what to give for a loader's batch."""
    with pytest.raises(SampleError, match=r"(?s)Classifier refuses the sample.*loss="):
        recoup.fit(Classifier(), examples(), budget="1GiB")


def test_a_pair_with_a_loss_of_one_argument_that_the_model_refuses() -> None:
    with pytest.raises(SampleError, match=r"(?s)refuses the sample.*targets"):
        recoup.fit(Classifier(), examples(), budget="1GiB", loss=lambda output: output.mean())


def test_a_batch_of_three_with_a_loss_of_two_arguments() -> None:
    """The last are the targets; the others are the model's arguments."""
    x, y = examples()
    fitted(Attended(), (x, torch.ones(len(x)), y), loss=nn.CrossEntropyLoss())
    with pytest.raises(SampleError, match=r"Classifier refuses the sample .*3 were given"):
        recoup.fit(Classifier(), (x, x, y), budget="1GiB", loss=nn.CrossEntropyLoss())


def test_a_mapping_with_a_loss_of_two_arguments() -> None:
    x, y = examples()
    with pytest.raises(SampleError, match=r"(?s)\(inputs, targets\)"):
        recoup.fit(Classifier(), {"x": x, "y": y}, budget="1GiB", loss=nn.CrossEntropyLoss())


def test_swapped_inputs_and_targets() -> None:
    x, y = examples()
    with pytest.raises(SampleError, match="Classifier refuses the sample"):
        recoup.fit(Classifier(), (y, x), budget="1GiB", loss=nn.CrossEntropyLoss())


def test_a_loss_that_fails_is_named_as_the_cause() -> None:
    """Not the model, which took the sample."""
    x, _ = examples()
    with pytest.raises((LossError, SampleError), match=r"(?s)loss=.*(target|Expected)") as caught:
        recoup.fit(Classifier(), (x, torch.randn(128, 3)), budget="1GiB", loss=nn.CrossEntropyLoss())
    assert "Classifier refuses the sample" not in str(caught.value)


def test_a_loss_without_reduction() -> None:
    with pytest.raises(LossError, match=r"scalar; got a tensor of shape \[128\]"):
        recoup.fit(Classifier(), examples(), budget="1GiB", loss=nn.CrossEntropyLoss(reduction="none"))


def test_a_class_of_losses_instead_of_one() -> None:
    with pytest.raises((LossError, SampleError), match=r"CrossEntropyLoss\(\)"):
        recoup.fit(Classifier(), examples(), budget="1GiB", loss=nn.CrossEntropyLoss)


@pytest.mark.parametrize("what", ["loader", "iterator", "dataset"])
def test_what_is_no_sample(what: str) -> None:
    """Near misses: the message says to take a batch, and the iterator is not advanced."""
    dataset = TensorDataset(*examples())
    loader = DataLoader(dataset, batch_size=64)
    given = {"loader": loader, "iterator": iter(loader), "dataset": dataset}[what]
    with pytest.raises(SampleError, match=r"next\("):
        recoup.fit(Classifier(), given, budget="1GiB", loss=nn.CrossEntropyLoss())
    if what == "iterator":
        assert len(list(given)) == 2


def test_no_labels_among_the_keyword_arguments() -> None:
    batch = tokens()
    del batch["labels"]
    with pytest.raises(LossError, match=r"loss=.*labels"):
        recoup.fit(gpt2(), batch, budget="1GiB")


def test_a_model_that_is_called_the_other_way() -> None:
    """A tuple where the model takes keywords in another order fails in the model, and the model's error is shown."""
    batch = tokens()
    with pytest.raises(SampleError, match=re.escape("a dict for model(**sample)")):
        recoup.fit(gpt2(), (batch["labels"], batch["input_ids"].float()), budget="1GiB")


# Several optimizers, and what is none


def test_several_optimizers() -> None:
    def run(is_fitted: bool) -> list[float]:
        torch.manual_seed(0)
        model, batch = Classifier(), examples()
        optimizers = [
            torch.optim.AdamW(model.blocks.parameters()),
            torch.optim.SGD(model.head.parameters(), lr=0.1),
        ]
        if is_fitted:
            found = fitted(model, batch, loss=nn.CrossEntropyLoss(), optimizer=optimizers)
            parameters = sum(4 * parameter.numel() for parameter in model.blocks.parameters())
            # AdamW's two moments, and its step counts.
            assert 2 * parameters <= found.profile.residents.optimizer_bytes <= 2 * parameters + 1024
            assert not optimizers[0].state
        both = Together(optimizers)
        return train(model, both, [batch] * 3, loss_of_examples)

    assert run(is_fitted=True) == run(is_fitted=False)


class Together:
    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    "make", [lambda model: torch.optim.AdamW, lambda model: model.parameters(), lambda model: "adamw"]
)
def test_what_is_no_optimizer(make: Callable[[nn.Module], Any]) -> None:
    model = Classifier()
    with pytest.raises(SampleError, match="optimizer="):
        recoup.fit(model, examples(), budget="1GiB", loss=nn.CrossEntropyLoss(), optimizer=make(model))


def test_an_optimizer_of_another_model() -> None:
    model, other = Classifier(), Classifier()
    optimizer = torch.optim.AdamW(other.parameters())
    budget = 5 * recoup.measure(model, examples(), loss=nn.CrossEntropyLoss()).plain_bytes
    recoup.fit(model, examples(), budget=budget, loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    assert not optimizer.state


def test_a_meta_model_says_to_name_the_hardware() -> None:
    with torch.device("meta"):
        model = Classifier()
    with pytest.raises(SampleError, match=r"(?s)meta.*hardware="):
        recoup.fit(model, examples(), budget="1GiB", loss=nn.CrossEntropyLoss())
    with pytest.raises(SampleError, match=r"(?s)meta.*hardware="):
        recoup.measure(model, examples(), loss=nn.CrossEntropyLoss())


def test_lazy_modules_are_to_be_run_once() -> None:
    model = nn.Sequential(nn.LazyLinear(32), nn.GELU(), nn.LazyLinear(10))
    x, y = examples()
    with pytest.raises(SampleError, match=r"(?i)lazy.*once"):
        recoup.fit(model, (x, y), budget="1GiB", loss=nn.CrossEntropyLoss())
    model(x)
    recoup.fit(model, (x, y), budget="1GiB", loss=nn.CrossEntropyLoss())
