"""`RecoupCallback` in TRL's SFTTrainer, where TRL is installed: the same losses, and metrics of trained steps only."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import recoup
from recoup.integrations.transformers import RecoupCallback

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")


def run(folder: Path, *callbacks: Any) -> list[tuple[Any, Any]]:
    """Losses and counted tokens, step by step."""
    from datasets.table import InMemoryTable

    random.seed(0)
    torch.manual_seed(0)
    vocabulary = {f"w{index}": index for index in range(100)} | {"<pad>": 100, "</s>": 101}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")),
        pad_token="<pad>",
        eos_token="</s>",
    )
    rows = [[random.randrange(100) for _ in range(random.randrange(10, 60))] for _ in range(16)]
    table = InMemoryTable.from_pydict({"input_ids": rows})
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 102}
    trainer = trl.SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4)),
        args=trl.SFTConfig(
            str(folder),
            per_device_train_batch_size=4,
            max_steps=3,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            logging_steps=1,
            save_strategy="no",
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=datasets.Dataset(table, fingerprint="rows"),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    trainer.train()
    return [(entry["loss"], entry["num_tokens"]) for entry in trainer.state.log_history if "loss" in entry]


def test_losses_and_metrics_are_those_without_a_plan(tmp_path: Path) -> None:
    callback = RecoupCallback("200MiB", race=False)
    plain, fitted = run(tmp_path), run(tmp_path, callback)
    assert len(plain) == 3
    assert plain == fitted
    assert callback.fitted is not None
    profile = callback.fitted.profile
    tight = RecoupCallback((recoup.minimum_budget(profile) + profile.plain_bytes) // 2, race=False)
    assert run(tmp_path, tight) == plain
    assert tight.fitted is not None
    assert any("recompute" in label for _, label in tight.fitted.plan.describe_units())
