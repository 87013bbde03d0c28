"""Fitted models in transformers, accelerate and Lightning: nothing breaks, and nothing is silent."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from everyday.subjects import CHECKPOINTING
from torch import Tensor, nn

import recoup
from recoup.engines import is_applied
from recoup.errors import RecoupWarning

transformers = pytest.importorskip("transformers")
# Deprecations inside these libraries are theirs.
pytestmark = pytest.mark.filterwarnings("ignore", "error::recoup.errors.RecoupWarning")

TOKENS = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows with a column that no model takes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = TOKENS[index % 4]
        return {"input_ids": row, "labels": row, "source": torch.tensor(index)}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    return model


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).train()
    return model


def pair(make: Any, *, accumulates: bool = False) -> tuple[nn.Module, nn.Module]:
    """A plain model and its copy under a plan of the smallest budget."""
    plain = make()
    model = copy.deepcopy(plain)
    profile = recoup.measure(model, BATCH, accumulates=accumulates)
    recoup.apply(model, recoup.plan(profile, recoup.minimum_budget(profile)))
    assert is_applied(model)
    return plain, model


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(entry.message) for entry in caught if issubclass(entry.category, RecoupWarning)]


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def train(model: nn.Module, folder: Path, **options: Any) -> None:
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        **options,
    )
    torch.manual_seed(2)
    transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows()).train()


def assert_same_weights(plain: nn.Module, model: nn.Module) -> None:
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, found), name


MODELS = pytest.mark.parametrize("make", [gpt2, llama])


@MODELS
def test_trainer_with_default_arguments(make: Any, tmp_path: Path) -> None:
    plain, model = pair(make)
    for each in (plain, model):
        train(each, tmp_path)
    assert_same_weights(plain, model)


@MODELS
def test_trainer_that_accumulates_gradients_and_evaluates(make: Any, tmp_path: Path) -> None:
    plain, model = pair(make, accumulates=True)
    for each in (plain, model):
        train(each, tmp_path, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1)
    assert_same_weights(plain, model)


@MODELS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_trainer_that_checkpoints(
    make: Any, use_reentrant: bool, tmp_path: Path, caught: list[warnings.WarningMessage]
) -> None:
    plain, model = pair(make)
    for each in (plain, model):
        train(
            each,
            tmp_path,
            **{
                f"{CHECKPOINTING}_checkpointing": True,
                f"{CHECKPOINTING}_checkpointing_kwargs": {"use_reentrant": use_reentrant},
            },
        )
    (message,) = told(caught)
    assert message.startswith("Units of the plan run inside checkpoints of the model's own")
    assert_same_weights(plain, model)


def test_trainer_in_mixed_precision(tmp_path: Path, caught: list[warnings.WarningMessage]) -> None:
    plain, model = pair(gpt2)
    for each in (plain, model):
        train(each, tmp_path, bf16=True)
    (message,) = told(caught)
    assert message.startswith(
        "The model runs under autocast to bfloat16, and the plan was measured without autocast"
    )
    assert_same_weights(plain, model)


@MODELS
def test_generate(make: Any) -> None:
    plain, model = pair(make)
    for each in (plain, model):
        each.eval()
    prompt = {"input_ids": TOKENS[:1, :5], "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found, expected = (each.generate(**prompt, **options) for each in (model, plain))
    assert torch.equal(found, expected)
    # Also in the middle of training, with gradients on.
    model.train()
    assert model.generate(**prompt, **options).shape[1] > 5
    model(**BATCH).loss.backward()


@MODELS
def test_signatures(make: Any) -> None:
    plain, model = pair(make)
    touched = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert len(touched) > 2
    for name in touched:
        expected = plain.get_submodule(name).forward
        assert inspect.signature(model.get_submodule(name).forward) == inspect.signature(expected), name


@MODELS
def test_pretrained_files(make: Any, tmp_path: Path) -> None:
    plain, model = pair(make)
    model.save_pretrained(tmp_path)
    assert_same_weights(plain, type(plain).from_pretrained(tmp_path))


def test_accelerate_in_mixed_precision(caught: list[warnings.WarningMessage]) -> None:
    accelerate = pytest.importorskip("accelerate")
    plain, model = pair(gpt2)
    for each in (plain, model):
        each.config.attn_pdrop = 0.0
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        prepared = accelerator.prepare_model(each)
        assert inspect.signature(prepared.forward) == inspect.signature(type(each).forward.__get__(each))
        torch.manual_seed(2)
        accelerator.backward(prepared(**BATCH).loss)
        accelerator.free_memory()
    (message,) = told(caught)
    assert "under autocast to bfloat16" in message
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)
    copied = copy.deepcopy(model)
    assert _num_runs(copied) == _num_runs(model) > _num_runs(plain)


def _num_runs(model: Any) -> int:
    """How often modules inside blocks run in a step."""
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    inside = [module for block in model.transformer.h for module in block.modules() if module is not block]
    handles = [module.register_forward_hook(count) for module in inside]
    model(**BATCH).loss.backward()
    for handle in handles:
        handle.remove()
    return runs


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    # Its trainer clears gradients after the forward.
    plain, model = pair(gpt2, accumulates=True)
    for each in (plain, model):
        torch.manual_seed(2)
        trainer = lightning.Trainer(
            max_steps=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(Module(each), torch.utils.data.DataLoader(Rows(), batch_size=2))
    assert_same_weights(plain, model)
