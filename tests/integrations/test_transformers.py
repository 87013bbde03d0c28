"""`RecoupCallback` in transformers' Trainer: the same losses as without it, a peak under the budget."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from everyday.subjects import CHECKPOINTING, PEFT_ASKS, assert_same, gpt2, peak_bytes, state_of
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

from recoup.engines import is_applied
from recoup.errors import BudgetError, SampleError
from recoup.integrations.batches import batches_of, largest_batch_of
from recoup.integrations.transformers import RecoupCallback, fit_trainer
from recoup.plans import ModelPlan

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    PEFT_ASKS,
]


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of different lengths."""

    def __init__(self, num_rows: int = 24) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = [6 + 17 * index % 26 for index in range(num_rows)]
        self.rows = [torch.randint(20, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index]}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": tokens, "labels": tokens}


class Losses(TrainerCallback):
    """Every loss that is logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def trainer_for(
    folder: Path, *callbacks: TrainerCallback, kind: type[Trainer] = Trainer, make: Any = gpt2, **options: Any
) -> Trainer:
    torch.manual_seed(0)
    options = {"save_strategy": "no", "max_steps": 3, "per_device_train_batch_size": 4} | options
    arguments = TrainingArguments(
        str(folder), report_to=[], disable_tqdm=True, logging_steps=1, use_cpu=True, **options
    )
    model, rows = make(), Rows()
    trainer = kind(
        model=model, args=arguments, train_dataset=rows, data_collator=padded, callbacks=list(callbacks)
    )
    torch.manual_seed(1)
    return trainer


def budget_for(make: Callable[[], Any] = gpt2, share: float = 0.75) -> int:
    """Between what stays and the plain peak of a step on the largest batch, AdamW's state included."""
    model = make().train()
    batch = padded([Rows()[index] for index in (0, 2, 4, 6)])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    num_bytes = sum(p.nbytes for p in model.parameters())

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return int(share * (peak_bytes(step) + num_bytes))


def lora() -> Any:
    return get_peft_model(
        gpt2(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    )


class Squared(Trainer):
    """A loss of the user's own."""

    def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
        return super().compute_loss(model, inputs, **given).square()


CHECKPOINTED = {f"{CHECKPOINTING}_checkpointing": True}
SITUATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "checkpointing on": CHECKPOINTED,
    "bf16, accumulation, smoothing": {
        "bf16": True,
        "gradient_accumulation_steps": 2,
        "label_smoothing_factor": 0.1,
    },
    "LoRA": {"make": lora},
    "a loss of its own": {"kind": Squared},
}


@pytest.mark.parametrize("options", SITUATIONS.values(), ids=SITUATIONS.keys())
def test_losses_and_weights_are_those_without_a_plan(options: dict[str, Any], tmp_path: Path) -> None:
    make = options.get("make", gpt2)
    ends = []
    callback = RecoupCallback(budget_for(make, 0.85), race=False)
    for callbacks in ([], [callback]):
        noted = Losses()
        trainer = trainer_for(tmp_path / str(len(callbacks)), noted, *callbacks, **options)
        trainer.train()
        ends.append((noted.losses, state_of(trainer.model)))
    assert len(ends[0][0]) == 3
    assert ends[0][0] == ends[1][0]
    assert_same(ends[0][1], ends[1][1])
    assert callback.fitted is not None
    assert callback.fitted.verification is not None
    assert callback.fitted.verification.peak_bytes <= callback.fitted.plan.budget_bytes
    assert is_applied(trainer.model)


# The compiler looks at the gradients of what it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning")
def test_a_trainer_that_compiles_with_another_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured units run without it; what compiles is refused, and the refusal names them."""
    # Which arguments of a trainer write, for all trainers after it.
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    options = {"torch_compile_backend": "aot_eager"}
    callback = RecoupCallback("100MiB", engine="captured", race=False)
    plain = trainer_for(tmp_path)
    plain.train()
    planned = trainer_for(tmp_path, callback, **options)
    planned.train()
    assert_same(state_of(plain.model), state_of(planned.model))
    assert callback.fitted is not None
    assert callback.fitted.profile.is_captured
    refused = trainer_for(tmp_path, RecoupCallback(budget_for()), **options)
    with pytest.raises(SampleError, match=r"is compiled.*another backend for engine='captured'"):
        refused.train()


class Watched(Trainer):
    """The peaks of its micro-batches."""

    peaks: list[int] | None = None

    def training_step(self, *given: Any) -> Any:
        if self.peaks is None:
            return super().training_step(*given)
        ends: list[Any] = []
        run = super().training_step
        self.peaks.append(
            peak_bytes(lambda: ends.append(run(*given)), self.model, self.optimizer, *given[1:])
        )
        return ends.pop()


class Watching(TrainerCallback):
    """Once the model is fitted."""

    trainer: Watched

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.trainer.peaks = self.trainer.peaks or []


def test_gradients_are_there_only_in_later_micro_batches(tmp_path: Path) -> None:
    """The first steps of the trainer's loop have them in no forward, though a step of the fit follows another one."""
    for num_steps in (1, 2):
        callback, watching = RecoupCallback("1GiB", race=False), Watching()
        trainer = trainer_for(
            tmp_path, callback, watching, kind=Watched, gradient_accumulation_steps=num_steps
        )
        trainer.train_dataset.rows = [torch.arange(20)] * 24
        watching.trainer = trainer
        trainer.train()
        assert callback.fitted is not None
        assert bool(callback.fitted.profile.accumulates) == (num_steps > 1)
        assert len(trainer.peaks) == 3 * num_steps
        assert callback.fitted.plan.predicted_bytes == max(trainer.peaks)


def test_checkpointing_is_replaced_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, listener = logging.getLogger("transformers.recoup"), Listener()
    logger.addHandler(listener)
    try:
        callback = RecoupCallback(budget_for(), race=False)
        trainer = trainer_for(tmp_path, callback, **CHECKPOINTED, max_steps=1)
        trainer.train()
    finally:
        logger.removeHandler(listener)
    assert not checkpointed_modules(trainer.model)
    assert any("checkpointing) is replaced by recoup's plan" in line for line in said)


def test_the_plan_and_its_report_are_where_the_trainer_logs(tmp_path: Path) -> None:
    budget = budget_for()
    trainer = trainer_for(tmp_path, RecoupCallback(budget, race=False), max_steps=1)
    trainer.train()
    plan = ModelPlan.from_json((tmp_path / "recoup_plan.json").read_text())
    assert plan.budget_bytes == budget
    assert "<html" in (tmp_path / "recoup_report.html").read_text()
    logged = trainer.state.log_history[0]
    assert logged["recoup/budget_gib"] == budget / 2**30
    assert logged["recoup/peak_gib"] <= logged["recoup/budget_gib"]
    assert json.loads(json.dumps(trainer.state.log_history))


def test_resume_and_evaluation_in_between(tmp_path: Path) -> None:
    def run(name: str, *stops: int, fits: bool) -> dict[str, Tensor]:
        folder = tmp_path / name
        for stop in stops:
            callbacks = [RecoupCallback(budget_for(), race=False)] if fits else []
            trainer = trainer_for(folder, *callbacks, max_steps=stop, save_strategy="steps", save_steps=2)
            trainer.evaluate(Rows(4))
            trainer.train(resume_from_checkpoint=stop > stops[0])
            trainer.evaluate(Rows(4))
        trainer.model.save_pretrained(folder / "saved")
        assert (folder / "saved" / "model.safetensors").exists()
        return state_of(trainer.model)

    assert_same(run("plain", 2, 4, fits=False), run("fitted", 2, 4, fits=True))


def test_fit_trainer_twice_in_one_process(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, max_steps=1)
    callback = fit_trainer(trainer, budget_for(), race=False)
    assert callback.fitted is None
    trainer.train()
    first = callback.fitted
    trainer.train()
    assert first is not None
    assert callback.fitted is not None
    assert callback.fitted is not first
    assert callback.fitted.plan.budget_bytes == first.plan.budget_bytes


def test_a_refusal_makes_the_batch_smaller_where_the_trainer_looks_for_one(tmp_path: Path) -> None:
    options = {"max_steps": 1, "per_device_train_batch_size": 1}
    with pytest.raises(BudgetError, match="the smallest feasible budget is"):
        trainer_for(tmp_path, RecoupCallback(1000, race=False), **options).train()
    trainer = trainer_for(tmp_path, RecoupCallback(1000, race=False), auto_find_batch_size=True, **options)
    with pytest.raises(RuntimeError, match="No executable batch size found"):  # there is none below 1
        trainer.train()


@pytest.mark.slow
def test_the_batch_shrinks_until_a_plan_fits(tmp_path: Path) -> None:
    """Batches of 16 rows do not fit, whatever is recomputed."""
    callback = RecoupCallback("1100KiB", race=False)
    options = {"max_steps": 1, "per_device_train_batch_size": 16}
    trainer: Any = trainer_for(tmp_path, callback, auto_find_batch_size=True, **options)
    trainer.train()
    assert callback.fitted is not None
    assert callback.fitted.verification is not None
    assert callback.fitted.verification.peak_bytes <= 1100 * 1024
    assert 1 < trainer._train_batch_size < 16


def test_a_refusal_leaves_checkpointing_on(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, RecoupCallback(1000), **CHECKPOINTED, max_steps=1)
    with pytest.raises(BudgetError):
        trainer.train()
    assert checkpointed_modules(trainer.model)


def test_adapters_of_transformers_own_need_no_gradients_of_inputs(tmp_path: Path) -> None:
    """Checkpointing asks for them, which would save all that is before the first adapter."""

    def make() -> Any:
        model = gpt2(num_layers=6)
        model.add_adapter(LoraConfig(target_modules=["c_attn"], layers_to_transform=[5], fan_in_fan_out=True))
        return model

    plain_bytes = []
    for arguments in ({}, CHECKPOINTED):
        callback = RecoupCallback("1GiB", race=False)
        trainer_for(tmp_path, callback, make=make, max_steps=1, **arguments).train()
        assert callback.fitted is not None
        plain_bytes.append(callback.fitted.profile.plain_bytes)
    assert plain_bytes[0] == plain_bytes[1]


def checkpointed_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]


def test_a_refusal_leaves_it_on_where_it_was(tmp_path: Path) -> None:
    """Such as in every second layer."""
    trainer = trainer_for(tmp_path, RecoupCallback(1000), max_steps=1)
    layers = trainer.model.transformer.h
    layers[1].gradient_checkpointing = True
    layers[1]._gradient_checkpointing_func = own = partial(checkpoint, use_reentrant=False)
    with pytest.raises(BudgetError):
        trainer.train()
    assert [layer.gradient_checkpointing for layer in layers] == [False, True, False]
    assert layers[1]._gradient_checkpointing_func is own


def test_metrics_of_the_trainers_own_do_not_count_measured_steps(tmp_path: Path) -> None:
    class Counting(Trainer):
        num_calls = 0
        seen: list[int]

        def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
            self.num_calls += 1
            self.seen.append(self.num_calls)
            self.log({"number": self.num_calls})
            return super().compute_loss(model, inputs, **given)

    trainer: Any = trainer_for(tmp_path, RecoupCallback(budget_for(), race=False), kind=Counting)
    trainer.seen = []
    trainer.train()
    assert trainer.num_calls == 3
    assert trainer.seen == [1, 2, 3]
    assert [entry["number"] for entry in trainer.state.log_history if "number" in entry] == [1, 2, 3]


# Batches


def test_the_largest_of_a_few_batches_and_no_random_number_drawn() -> None:
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, shuffle=True, collate_fn=padded)
    state = torch.get_rng_state()
    batch = largest_batch_of(loader, num_batches=3)
    assert torch.equal(torch.get_rng_state(), state)
    found = batches_of(loader, num_batches=3)
    assert batch["input_ids"].shape == (4, max(each["input_ids"].shape[1] for each in found)) == (4, 30)


def test_empty_data() -> None:
    with pytest.raises(SampleError, match="The training data are empty"):
        largest_batch_of(torch.utils.data.DataLoader([], batch_size=2), num_batches=1)


def test_loaders_whose_batches_cannot_be_made_here_need_a_sample() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            raise AssertionError("read")

    class Buckets:
        def __iter__(self) -> Any:
            raise AssertionError("read")

    stream = torch.utils.data.DataLoader(Stream(), batch_size=2)
    with pytest.raises(SampleError, match=r"may be a stream.*give sample="):
        largest_batch_of(stream, num_batches=2)
    buckets: Any = torch.utils.data.DataLoader(Rows(), batch_sampler=Buckets())  # type: ignore[arg-type]
    with pytest.raises(SampleError, match=r"batches of any size: give sample="):
        largest_batch_of(buckets, num_batches=2)
    with pytest.raises(SampleError, match=r"A list does not say what it reads: give sample="):
        largest_batch_of([1, 2], num_batches=2)


def test_batches_of_a_sampler_with_a_size_and_rows_that_are_batches() -> None:
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(Rows()), 6, drop_last=True)
    loader: Any = torch.utils.data.DataLoader(Rows(), batch_sampler=sampler, collate_fn=padded)
    assert largest_batch_of(loader, num_batches=2)["input_ids"].shape[0] == 6
    whole: Any = torch.utils.data.DataLoader([torch.ones(4, 3), torch.ones(5, 3)], batch_size=None)  # type: ignore[arg-type]
    assert largest_batch_of(whole, num_batches=2).shape == (5, 3)


class Every(Sampler[Any]):
    """A sampler of the user's own: every second row, from where it stands."""

    def __init__(self) -> None:
        self.num_read = 0
        self.generator = torch.Generator().manual_seed(5)
        self.noise = torch.rand(3, generator=self.generator)

    def __iter__(self) -> Iterator[int]:
        for index in range(0, 12, 2):
            self.num_read += 1
            torch.rand(1, generator=self.generator)
            yield index


class Unreadable(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([0])

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a connection")


SUBSETS: dict[str, Callable[[], dict[str, Any]]] = {
    "SubsetRandomSampler": lambda: {"sampler": SubsetRandomSampler([1, 4, 6]), "batch_size": 2},
    "with a generator": lambda: {
        "sampler": SubsetRandomSampler([1, 4, 6], generator=torch.Generator().manual_seed(1)),
        "batch_size": 2,
    },
    "in batches": lambda: {"batch_sampler": BatchSampler(SubsetRandomSampler([1, 4, 6]), 2, drop_last=False)},
    "weights": lambda: {"sampler": WeightedRandomSampler([0, 1, 0, 0, 1, 0, 1], 30), "batch_size": 2},
    "the first rows": lambda: {"sampler": RandomSampler(range(3)), "batch_size": 2},
    "no batches": lambda: {"sampler": SubsetRandomSampler([1, 4, 6]), "batch_size": None},
    "of the user's own": lambda: {"sampler": Every(), "batch_size": 2},
}


@pytest.mark.parametrize("kind", SUBSETS)
def test_batches_are_made_of_the_rows_that_the_loader_reads(kind: str) -> None:
    options = SUBSETS[kind]()
    loader = torch.utils.data.DataLoader(list(torch.arange(12).split(1)), **options)
    sampler = options.get("sampler") or options["batch_sampler"].sampler
    generator = getattr(sampler, "generator", None)
    before = torch.get_rng_state(), None if generator is None else generator.get_state()
    rows = torch.cat([largest_batch_of(loader, num_batches=number).flatten() for number in range(1, 5)])
    allowed = {"the first rows": {0, 1, 2}, "of the user's own": {*range(0, 12, 2)}}.get(kind, {1, 4, 6})
    assert {*rows.tolist()} <= allowed
    assert torch.equal(torch.get_rng_state(), before[0])
    assert generator is None or torch.equal(generator.get_state(), before[1])
    assert getattr(sampler, "num_read", 0) == 0


def test_a_sampler_that_cannot_be_copied_needs_a_sample() -> None:
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, sampler=Unreadable())
    with pytest.raises(
        SampleError, match=r"Unreadable cannot be read without moving it \(a connection\): give sample="
    ):
        largest_batch_of(loader, num_batches=2)


# Without the library


@pytest.mark.parametrize("library", ["transformers", "lightning", "accelerate"])
def test_a_missing_library_has_its_command(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"recoup.integrations.{library}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {library}: pip install 'recoup\[{library}\]'"):
        __import__(f"recoup.integrations.{library}")
