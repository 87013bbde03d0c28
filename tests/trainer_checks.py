"""What trainers on several ranks check, for ``tests/integrations/test_ranks.py``."""

from __future__ import annotations

import os
import tempfile
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from autopilot_checks import FailAt
from everyday.subjects import checkpoint_layers
from on_ranks import assert_same, local
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.errors import UnitError
from recoup.ranks import find_ranks


def _as_launched(rank: int) -> None:
    """The variables that a launcher sets; the process group is there already."""
    warnings.simplefilter("ignore")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trainer_on_two_ranks(rank: int) -> None:
    """transformers' Trainer wraps the model for data parallelism itself."""
    _as_launched(rank)
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from recoup.integrations.transformers import RecoupCallback

    class Failing(Trainer):
        mode = FailAt()

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            with self.mode if "training_step" in vars(self) else nullcontext():
                return super().training_step(*args, **kwargs)

    def run(*callbacks: Any, mode: FailAt | None = None, **options: Any) -> Failing:
        torch.manual_seed(0)
        sizes = {"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 64, "n_positions": 32}
        model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))
        tokens = torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(1))
        arguments = TrainingArguments(
            tempfile.mkdtemp(),
            per_device_train_batch_size=4,
            max_steps=3,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
            **options,
        )
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Failing(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))
        trainer.mode = mode or FailAt()
        trainer.train()
        return trainer

    plain = run()
    assert isinstance(plain.model_wrapped, DistributedDataParallel)
    callback = RecoupCallback("2MiB")
    fitted = run(callback)
    assert_same(_weights(fitted.model), _weights(plain.model))
    assert callback.fitted is not None
    assert callback.fitted.verification is not None
    assert callback.fitted.verification.peak_bytes <= 2 * 2**20
    assert any("recompute" in label for _, label in callback.fitted.plan.describe_units())
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, callback.fitted.plan.to_json())
    assert plans[0] == plans[1]
    for options in ({}, {"gradient_accumulation_steps": 2}):
        expected = _weights(run(**options).model)
        counting = FailAt()
        run(RecoupCallback("2.2MiB", autopilot=True, race=False), mode=counting, **options)
        number = find_ranks().smallest(counting.number)
        for part in (1, 4):
            callback = RecoupCallback("2.2MiB", autopilot=True, race=False)
            mode = FailAt(part * number // 5 if rank == 1 else -1)
            assert_same(_weights(run(callback, mode=mode, **options).model), expected)
            assert callback.pilot is not None
            [event] = callback.pilot.events
            assert event.reason == ("injected" if rank == 1 else "on another rank")


def trainer_with_a_sharded_model(rank: int) -> None:
    """transformers shards it with FSDP2 when it is loaded; micro-batches before the last do not reduce."""
    _as_launched(rank)
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.distributed import DistributedConfig

    from recoup.integrations.transformers import RecoupCallback

    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    if rank == 0:
        LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).save_pretrained(folders[0])
    dist.barrier()
    tokens = torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(1))

    def load() -> Any:
        config = DistributedConfig(fsdp_size=2)
        return LlamaForCausalLM.from_pretrained(folders[0], distributed_config=config, dtype=torch.float32)

    model = load().train()
    checkpoint_layers(model)
    with pytest.raises(UnitError, match="checkpoint"):
        recoup.fit(model, {"input_ids": tokens[:4], "labels": tokens[:4]}, budget="1GiB")

    def run(*callbacks: Any, **options: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = load()
        arguments = TrainingArguments(
            tempfile.mkdtemp(),
            per_device_train_batch_size=4,
            max_steps=2,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
            **options,
        )
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))
        trainer.train()
        return {name: local(weight) for name, weight in _weights(trainer.model).items()}

    for options, accumulates in (({}, False), ({"gradient_accumulation_steps": 2}, "unreduced")):
        callback = RecoupCallback("1MiB", race=False)
        assert_same(run(callback, **options), run(**options))
        fitted = callback.fitted
        assert fitted is not None
        assert fitted.verification is not None
        assert fitted.profile.accumulates == accumulates
        assert fitted.verification.peak_bytes <= 2**20
        assert any("recompute" in label for _, label in fitted.plan.describe_units())
        assert fitted.plan.predicted_bytes == fitted.verification.peak_bytes


def lightning_on_two_ranks(rank: int) -> None:
    """Lightning's strategy for data parallelism, in processes that a launcher started."""
    _as_launched(rank)
    import lightning
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy
    from lightning_subjects import Classifier
    from torch.utils.data import DataLoader, TensorDataset

    from recoup.integrations.lightning import RecoupCallback

    class Failing(Classifier):
        mode: Any = nullcontext()

        def training_step(self, batch: Any) -> Tensor:
            with self.mode if self.piloted else nullcontext():
                return super().training_step(batch)

        def backward(self, loss: Tensor) -> None:
            with self.mode if self.piloted else nullcontext():
                super().backward(loss)

        @property
        def piloted(self) -> bool:
            return "_make_closure" in vars(self.trainer.fit_loop.epoch_loop.automatic_optimization)

    def run(*callbacks: Any, mode: Any = None, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        module = Failing()
        module.mode = mode
        data = TensorDataset(torch.randn(1024, 16), torch.randint(10, (1024,)))
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(process_group_backend="gloo"),
            callbacks=list(callbacks),
            logger=CSVLogger(tempfile.mkdtemp()),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(module, DataLoader(data, batch_size=256))
        return module

    plain = run()
    callback = RecoupCallback("1.6MiB")
    fitted = run(callback)
    assert_same(_weights(fitted), _weights(plain))
    assert callback.fitted is not None
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, callback.fitted.plan.to_json())
    assert plans[0] == plans[1]
    assert any("recompute" in label for _, label in callback.fitted.plan.describe_units())
    for options in ({}, {"accumulate_grad_batches": 2}):
        expected = _weights(run(**options))
        counting = FailAt()
        run(RecoupCallback("1.6MiB", autopilot=True, race=False), mode=counting, **options)
        number = find_ranks().smallest(counting.number)
        for part in (1, 4):
            callback = RecoupCallback("1.6MiB", autopilot=True, race=False)
            mode = FailAt(part * number // 5 if rank == 1 else -1)
            assert_same(_weights(run(callback, mode=mode, **options)), expected)
            assert callback.pilot is not None
            assert len(callback.pilot.events) == 1
