"""peft: LoRA before and after `fit`, adapters merged, and a frozen base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from everyday.subjects import (
    PEFT_ASKS,
    assert_same,
    budget_for,
    gpt2,
    llama,
    loss_of_tokens,
    peak_bytes,
    state_of,
    tokens,
    train,
)
from peft import LoraConfig, PeftModel, PrefixTuningConfig, TaskType, get_peft_model
from torch import nn

import recoup
from recoup.engines import is_applied
from recoup.errors import BudgetError

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to.*:UserWarning"),
    PEFT_ASKS,
]


def lora(model: nn.Module) -> Any:
    return get_peft_model(
        model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, lora_dropout=0.1)
    )


def run(make: Callable[[], Any], fit_when: str | None) -> tuple[list[float], list[Any], int, int]:
    """Losses, state, peak and budget of a fine-tuning."""
    torch.manual_seed(0)
    model = make()
    batches = [tokens() for _ in range(3)]
    budget = 0
    if fit_when == "before":
        budget = budget_for(model, batches[0])
        recoup.fit(model, batches[0], budget=budget)
    torch.manual_seed(1)
    model = lora(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if fit_when == "after":
        budget = budget_for(model, batches[0], optimizer)
        fitted = recoup.fit(model, batches[0], budget=budget, optimizer=optimizer)
        assert fitted.verification.gradients == "bit-equal"
        assert not optimizer.state
    if fit_when is not None:
        assert is_applied(model)
    losses: list[float] = []
    peak = peak_bytes(
        lambda: losses.extend(train(model, optimizer, batches, loss_of_tokens)), model, batches[0]
    )
    return losses, state_of(model, optimizer), peak, budget


def test_fit_after_get_peft_model() -> None:
    losses, state, plain_bytes, _ = run(llama, None)
    fitted_losses, fitted_state, peak, budget = run(llama, "after")
    assert fitted_losses == losses
    assert_same(fitted_state, state)
    assert peak <= budget < plain_bytes


def test_fit_before_get_peft_model() -> None:
    """The adapters are inside the units then: the numbers are the plain run's, and memory is saved."""
    losses, state, plain_bytes, _ = run(gpt2, None)
    fitted_losses, fitted_state, peak, _ = run(gpt2, "before")
    assert fitted_losses == losses
    assert_same(fitted_state, state)
    assert peak < plain_bytes


def test_inputs_that_need_gradients() -> None:
    """As people do for adapters with gradient checkpointing: the embedding's output is made to need one."""

    def run(is_fitted: bool) -> list[float]:
        torch.manual_seed(0)
        model, batch = lora(gpt2()), tokens()
        model.enable_input_require_grads()
        if is_fitted:
            recoup.fit(model, batch, budget=budget_for(model, batch))
            assert is_applied(model)
        return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), [batch] * 2, loss_of_tokens)

    assert run(is_fitted=True) == run(is_fitted=False)


def test_generate_merge_and_save_after_fit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = lora(gpt2()), tokens()
    recoup.fit(model, batch, budget=budget_for(model, batch))
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), [batch] * 2, loss_of_tokens)
    model.save_pretrained(tmp_path / "adapter")
    model.eval()
    prompt = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3).long()}
    expected = model.generate(**prompt, max_new_tokens=4, pad_token_id=1)
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(gpt2(), tmp_path / "adapter").eval()
    assert torch.equal(loaded.generate(**prompt, max_new_tokens=4, pad_token_id=1), expected)
    merged = model.merge_and_unload()
    assert torch.equal(merged.generate(**prompt, max_new_tokens=4, pad_token_id=1), expected)


def test_adapters_switched_off_inside_a_fitted_step() -> None:
    """Preference training compares with the base model: the same model with its adapters off, without gradients."""

    def run(is_fitted: bool) -> list[float]:
        torch.manual_seed(0)
        model, batch = lora(gpt2()), tokens()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if is_fitted:
            recoup.fit(model, batch, budget=budget_for(model, batch))
        losses = []
        torch.manual_seed(1)
        for _ in range(2):
            with torch.no_grad(), model.disable_adapter():
                reference = model(**batch).loss
            optimizer.zero_grad()
            loss = model(**batch).loss - reference
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert run(is_fitted=True) == run(is_fitted=False)


def test_prefix_tuning() -> None:
    """Trains a cache of keys and values that every block reads: fitted, or refused with a reason."""
    torch.manual_seed(0)
    model = get_peft_model(gpt2(), PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4))
    batch = tokens(length=24)
    plain_bytes = recoup.measure(model, batch).plain_bytes
    # A second run finds the cache longer by the first one's keys.
    why = r"'base_model.transformer.h.0.attn' and 2 more are kept, since a replay would not be safe \(replay fails"
    with pytest.raises(BudgetError, match=why):
        recoup.fit(model, batch, budget=plain_bytes // 2)
    # What is in a block beside the attention can be replayed.
    fitted = recoup.fit(model, batch, budget=plain_bytes * 3 // 4)
    assert fitted.verification.gradients == "bit-equal"
