"""transformers: its Trainer with its defaults, `generate`, `from_pretrained`, and its gradient checkpointing."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from everyday.subjects import (
    CHECKPOINTING,
    assert_same,
    budget_for,
    checkpoint_layers,
    gpt2,
    llama,
    loss_of_tokens,
    peak_bytes,
    state_of,
    tokens,
    train,
)
from slowly import slow_but
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    DataCollatorWithPadding,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import recoup
from recoup.engines import is_applied
from recoup.errors import RecoupWarning

pytestmark = [
    # The loader asks for pinned memory wherever torch says that there may be an accelerator.
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


class Texts(Dataset[dict[str, Any]]):
    """Rows with a column that the model does not take, as datasets have them."""

    def __init__(self, num_rows: int = 24) -> None:
        self.rows = tokens(num_rows)

    def __len__(self) -> int:
        return len(self.rows["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": f"row {index}", **{name: column[index] for name, column in self.rows.items()}}


def fit_tokens(model: nn.Module, **options: Any) -> recoup.Fitted:
    """Fits in 0.8 of the plain step's peak."""
    with torch.random.fork_rng(devices=[]):
        batch = tokens()
    budget = budget_for(model, batch, options.get("optimizer"))
    fitted = recoup.fit(model, batch, budget=budget, **options)
    assert is_applied(model)
    return fitted


@pytest.fixture
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer's default output folder is in the present one."""
    monkeypatch.chdir(tmp_path)


# The Trainer


def run_trainer(*, is_fitted: bool, make: Any = gpt2) -> tuple[float, dict[str, Tensor], int, int]:
    """The shortest script: default arguments. Loss, weights, peak and budget."""
    torch.manual_seed(0)
    model, dataset = make(), Texts()
    budget = 0
    if is_fitted:
        budget = fit_tokens(model, optimizer=torch.optim.AdamW(model.parameters())).plan.budget_bytes
    trainer = Trainer(model=model, args=TrainingArguments(), train_dataset=dataset)
    outcome = []
    peak = peak_bytes(lambda: outcome.append(trainer.train()), model)
    return outcome[0].training_loss, state_of(model)[0][0], peak, budget


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("make", slow_but([llama], [gpt2, llama]))
def test_trainer_with_default_arguments(make: Any) -> None:
    """The same losses and weights as of the model that is not fitted, and the peak under the budget."""
    loss, weights, plain_bytes, _ = run_trainer(is_fitted=False, make=make)
    fitted_loss, fitted_weights, peak, budget = run_trainer(is_fitted=True, make=make)
    assert fitted_loss == loss
    assert_same(fitted_weights, weights)
    # The Trainer fetches a batch ahead; `fit` counts one.
    assert peak <= budget + 2 * 3 * 8 * 32 * 8
    assert peak < 0.9 * plain_bytes


@pytest.mark.usefixtures("_in_a_folder")
def test_the_same_fitted_model_trained_twice() -> None:
    """As one goes on training: each Trainer prepares the model anew."""

    def run(is_fitted: bool) -> list[float]:
        torch.manual_seed(0)
        model, dataset = gpt2(), Texts()
        if is_fitted:
            fit_tokens(model)
        losses = []
        for _ in range(2):
            losses.append(Trainer(model=model, train_dataset=dataset).train().training_loss)
        return losses

    assert run(is_fitted=True) == run(is_fitted=False)


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.filterwarnings("ignore:.*num_items_in_batch.*")
@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5},
        {"bf16": True, "use_cpu": True},
        {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
    ],
    ids=["accumulation", "bf16", "evaluation"],
)
def test_trainer_with_arguments(arguments: dict[str, Any]) -> None:
    def run(is_fitted: bool) -> list[Any]:
        torch.manual_seed(0)
        model, dataset = gpt2(), Texts()
        if is_fitted:
            options: dict[str, Any] = {}
            if arguments.get("bf16"):
                options["step"] = autocast_step(model, tokens())
            fit_model(model, options, accumulates="gradient_accumulation_steps" in arguments)
        arguments_ = TrainingArguments(
            per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1, **arguments
        )
        trainer = Trainer(model=model, args=arguments_, train_dataset=dataset, eval_dataset=dataset)
        trainer.train()
        history = [
            {key: entry[key] for key in ("loss", "eval_loss", "grad_norm") if key in entry}
            for entry in trainer.state.log_history
        ]
        return [history, state_of(model)]

    assert_same(run(is_fitted=True), run(is_fitted=False))


def autocast_step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()

    return step


def fit_model(model: nn.Module, options: dict[str, Any], **more: Any) -> None:
    batch = () if "step" in options else (tokens(),)
    budget = int(0.85 * recoup.measure(model, *batch, **options, **more).plain_bytes)
    recoup.fit(model, *batch, budget=budget, **options, **more)
    assert is_applied(model)


@pytest.mark.usefixtures("_in_a_folder")
def test_trainer_saves_and_loads_a_fitted_model(tmp_path: Path) -> None:
    model = gpt2()
    fit_tokens(model)
    trainer = Trainer(model=model, train_dataset=Texts(8))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert not is_applied(loaded)


# from_pretrained


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    gpt2().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_from_pretrained_is_in_eval_mode_and_that_is_said(saved: Path) -> None:
    """A plan for eval mode would do nothing in training. Said once, with what to do; done, it is silent."""
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert not model.training
    batch = tokens()
    with pytest.warns(RecoupWarning, match=r"eval.*model\.train\(\)") as caught:
        recoup.fit(model, batch, budget="1GiB")
    assert len(caught) == 1
    model.train()
    recoup.fit(model, batch, budget=budget_for(model, batch))


def test_the_five_lines_of_the_readme(saved: Path) -> None:
    """Loaded, put into train mode, fitted, trained: the losses of the plain run, under the budget."""

    def run(is_fitted: bool) -> tuple[list[float], int, int]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(saved).train()
        optimizer = torch.optim.AdamW(model.parameters())
        batches = [tokens() for _ in range(3)]
        budget = 0
        if is_fitted:
            budget = budget_for(model, batches[0], optimizer)
            recoup.fit(model, batches[0], budget=budget, optimizer=optimizer)
        losses: list[float] = []
        peak = peak_bytes(
            lambda: losses.extend(train(model, optimizer, batches, loss_of_tokens)), model, batches[0]
        )
        return losses, peak, budget

    losses, plain_bytes, _ = run(is_fitted=False)
    fitted_losses, peak, budget = run(is_fitted=True)
    assert fitted_losses == losses
    assert peak <= budget < plain_bytes


@pytest.mark.filterwarnings("default::recoup.errors.RecoupWarning")
def test_fitted_in_eval_mode_training_mode_afterwards_keeps_its_numbers(saved: Path) -> None:
    """The plan is for another mode: it may not save memory, but must change nothing."""

    def run(is_fitted: bool) -> list[float]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(saved)
        if is_fitted:
            fit_tokens(model)
        model.train()
        return train(model, torch.optim.AdamW(model.parameters()), [tokens()] * 2, loss_of_tokens)

    assert run(is_fitted=True) == run(is_fitted=False)


# generate


@pytest.mark.parametrize(
    ("make", "options"), [(gpt2, {"do_sample": True, "top_k": 5}), (llama, {"num_beams": 2})]
)
def test_generate_after_fit(make: Any, options: dict[str, Any]) -> None:
    model = make(use_cache=True).eval()
    prompt = BatchEncoding(
        {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3).long()}
    )
    torch.manual_seed(2)
    expected = model.generate(**prompt, max_new_tokens=8, pad_token_id=1, **options)
    model.train()
    fit_tokens(model)
    model.eval()
    torch.manual_seed(2)
    assert torch.equal(model.generate(**prompt, max_new_tokens=8, pad_token_id=1, **options), expected)
    # In the midst of training, as reinforcement learning does.
    model.train()
    with torch.no_grad():
        model.generate(**prompt, max_new_tokens=2, pad_token_id=1)


def test_generate_between_two_steps() -> None:
    def run(is_fitted: bool) -> list[Any]:
        torch.manual_seed(0)
        model = gpt2()
        optimizer, batch = torch.optim.AdamW(model.parameters()), tokens()
        if is_fitted:
            fit_tokens(model, optimizer=optimizer)
        losses, texts = [], []
        for _ in range(2):
            losses += train(model, optimizer, [batch], loss_of_tokens)
            model.eval()
            texts.append(model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, pad_token_id=1))
            model.train()
        return [losses, texts]

    assert_same(run(is_fitted=True), run(is_fitted=False))


# Signatures


@pytest.mark.parametrize("make", slow_but([gpt2], [gpt2, llama]))
def test_signatures_are_the_model_s_own(make: Any) -> None:
    model = make()
    expected = inspect.signature(model.forward)
    fit_tokens(model)
    assert inspect.signature(model.forward) == expected
    assert "input_ids" in inspect.signature(model.forward).parameters
    assert model.forward.__doc__ == type(model).forward.__doc__
    assert model.forward.__name__ == "forward"


# Other kinds of models


def test_an_encoder_and_decoder() -> None:
    config = T5Config(
        vocab_size=128, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).train()
    batch = tokens()
    fitted = recoup.fit(model, batch, budget=budget_for(model, batch, share=0.85))
    assert fitted.verification.gradients == "bit-equal to a step with use_cache off"
    out = model.eval().generate(batch["input_ids"], max_new_tokens=4)
    assert out.shape[0] == 8


@pytest.mark.parametrize("make", slow_but([llama], [gpt2, llama]))
def test_a_cache_that_the_plan_switches_off_is_named(make: Any) -> None:
    """And one that it does not switch off is not: where the caller says so."""
    model, batch = make(use_cache=True), tokens()
    fitted = recoup.fit(model, batch, budget=budget_for(model, batch))
    assert fitted.verification.gradients == "bit-equal to a step with use_cache off"
    assert any("key-value cache (use_cache) off" in note for note in fitted.verification.notes)
    assert "bit-equal to a step with use_cache off" in str(fitted)
    given = {**batch, "use_cache": False}
    fitted = recoup.fit(model, given, budget=budget_for(model, given))
    assert (fitted.verification.gradients, fitted.verification.notes) == ("bit-equal", ())


@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize("family", ["Phi3", "Falcon"])
def test_layers_that_take_use_cache_are_compared_with_a_step_without_a_plan(family: str, engine: str) -> None:
    """Their stand-ins kept the plan in the plain step: it was compared with itself."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    more = {"intermediate_size": 64, "num_key_value_heads": 4, "pad_token_id": 0} if family == "Phi3" else {}
    torch.manual_seed(0)
    torch.compiler.reset()
    model: Any = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**sizes, **more)
    ).train()
    batch, before = tokens(), counters["stats"]["unique_graphs"]
    fitted = recoup.fit(model, batch, budget=budget_for(model, batch), engine=engine, race=False)
    seen = fitted.verification
    assert seen.peak_bytes < seen.plain_peak_bytes == pytest.approx(fitted.profile.plain_bytes, rel=0.01)
    # All layers but the first are of one kind: the compiler does not see another stand-in in each of them.
    assert counters["stats"]["unique_graphs"] - before <= 4


@pytest.mark.parametrize("make", slow_but([gpt2], [gpt2, llama]))
def test_a_plan_that_keeps_everything_switches_the_cache_off(make: Any) -> None:
    """The step was measured without it: with the cache on, it would take more than was predicted."""
    model, batch = make(use_cache=True), tokens()
    fitted = recoup.fit(model, batch, budget="1GiB")
    assert fitted.verification.gradients == "bit-equal to a step with use_cache off"
    assert fitted.verification.peak_bytes == fitted.verification.plain_peak_bytes
    assert fitted.plan.predicted_bytes == pytest.approx(fitted.verification.peak_bytes, rel=1e-3)
    assert model(**batch).past_key_values is None
    assert model(**batch, use_cache=True).past_key_values is not None
    with torch.no_grad():
        assert model(**batch).past_key_values is not None
    recoup.remove(model)
    assert model(**batch).past_key_values is not None


# Gradient checkpointing of the model's own


def test_gradient_checkpointing_before_fit_says_what_to_switch_off() -> None:
    model = gpt2()
    checkpoint_layers(model)
    with pytest.raises(recoup.errors.FitError, match=rf"{CHECKPOINTING}_checkpointing_disable\(\)"):
        recoup.fit(model, tokens(), budget="1GiB")


def test_gradient_checkpointing_of_a_model_inside_another_says_what_to_switch_off() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = gpt2()

        def forward(self, **batch: Any) -> Any:
            return self.net(**batch).loss

    model = Outer()
    checkpoint_layers(model.net)
    with pytest.raises(
        recoup.errors.FitError, match=rf"with model\.net\.{CHECKPOINTING}_checkpointing_disable\(\)"
    ):
        recoup.fit(model, tokens(), budget="1GiB")


def test_gradient_checkpointing_after_fit_is_said_once() -> None:
    """TRL switches it on by default. The gradients stay those of the plain step."""

    def run(is_fitted: bool) -> list[float]:
        torch.manual_seed(0)
        model = gpt2()
        optimizer, batch = torch.optim.AdamW(model.parameters()), tokens()
        if is_fitted:
            fit_tokens(model, optimizer=optimizer)
        checkpoint_layers(model)
        return train(model, optimizer, [batch] * 3, loss_of_tokens)

    expected = run(is_fitted=False)
    with pytest.warns(RecoupWarning, match=r"activation_checkpointing_disable\(\)") as caught:
        assert run(is_fitted=True) == expected
    assert len(caught) == 1


@pytest.mark.usefixtures("_in_a_folder")
def test_gradient_checkpointing_by_the_trainer_s_argument() -> None:
    model = gpt2()
    fit_tokens(model)
    arguments = TrainingArguments(**{f"{CHECKPOINTING}_checkpointing": True}, max_steps=2)
    with pytest.warns(RecoupWarning, match=r"checkpoint.*activation_checkpointing=False") as caught:
        Trainer(model=model, args=arguments, train_dataset=Texts()).train()
    assert len([one for one in caught if issubclass(one.category, RecoupWarning)]) == 1


def test_a_collator_s_batch() -> None:
    """DataCollatorWithPadding returns a BatchEncoding."""

    class Tokenizer:
        """The part of a tokenizer that collators use."""

        def pad(self, rows: list[dict[str, Tensor]], **options: Any) -> BatchEncoding:
            return BatchEncoding({name: torch.stack([row[name] for row in rows]) for name in rows[0]})

    rows = tokens()
    collate = DataCollatorWithPadding(Tokenizer())
    batch = collate([{name: column[index] for name, column in rows.items()} for index in range(8)])
    assert isinstance(batch, BatchEncoding)
    model = gpt2()
    assert recoup.fit(model, batch, budget=budget_for(model, batch)).verification.gradients == "bit-equal"


def test_embeddings_may_be_resized_after_fit_and_the_plan_stays_right() -> None:
    """New tokens are often added late: the plan runs on, with the same gradients."""

    def run(is_fitted: bool) -> list[float]:
        torch.manual_seed(0)
        model: GPT2LMHeadModel = gpt2()
        if is_fitted:
            fit_tokens(model)
        torch.manual_seed(4)
        model.resize_token_embeddings(130, mean_resizing=False)
        return train(model, torch.optim.AdamW(model.parameters()), [tokens()] * 2, loss_of_tokens)

    assert run(is_fitted=True) == run(is_fitted=False)
