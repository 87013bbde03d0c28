"""Small models of real libraries, and what a training run may be compared by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from recoup.measuring import MemoryTracker

VOCABULARY = 128
CHECKPOINTING = "activation" if hasattr(GPT2LMHeadModel, "activation_checkpointing_enable") else "gradient"
"""How transformers names checkpointing: ``gradient_checkpointing`` before 5.23."""
PEFT_ASKS = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
"""Under that name, also where transformers has another."""


def checkpoint_layers(model: Any) -> None:
    """By the model's own means."""
    getattr(model, f"{CHECKPOINTING}_checkpointing_enable")()


def gpt2(num_layers: int = 3, **options: Any) -> GPT2LMHeadModel:
    """In train mode, with transformers' default dropout of 0.1.

    Without a key-value cache, which a plan switches off: with it the plain step may round differently.
    """
    defaults = {
        "vocab_size": VOCABULARY,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": num_layers,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "loss_type": "ForCausalLM",
        "use_cache": False,
    }
    return GPT2LMHeadModel(GPT2Config(**defaults | options)).train()


def llama(num_layers: int = 3, **options: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=1,
        **{"use_cache": False} | options,
    )
    return LlamaForCausalLM(config).train()


def tokens(batch_size: int = 8, length: int = 32) -> dict[str, Tensor]:
    """A batch with labels, as a data collator for language models makes it."""
    ids = torch.randint(0, VOCABULARY, (batch_size, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Classifier(nn.Module):
    """Features in, the logits of ten classes out."""

    def __init__(self, num_blocks: int = 4, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def examples(num_samples: int = 128) -> tuple[Tensor, Tensor]:
    """Features and classes."""
    return torch.randn(num_samples, 32), torch.randint(0, 10, (num_samples,))


# Comparing


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of models, with gradients that are there, of optimizers and of batches."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        gradients = [parameter.grad for parameter in value.parameters() if parameter.grad is not None]
        return [*value.parameters(), *value.buffers(), *gradients]
    if isinstance(value, torch.optim.Optimizer):
        return tensors_of(list(value.state.values()))
    if hasattr(value, "values"):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def peak_bytes(run: Callable[[], Any], *living: Any) -> int:
    """The peak of ``run``, with the bytes of models, optimizers and batches that live before."""
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors_of(list(living))}
    with MemoryTracker() as memory:
        run()
    return memory.peak_bytes + sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def state_of(*things: Any) -> list[Any]:
    """A copy of what models, optimizers, schedulers and the like say of themselves, gradients included."""
    return [copy.deepcopy(_described(thing)) for thing in things]


def _described(thing: Any) -> Any:
    if isinstance(thing, nn.Module):
        gradients = {
            name: parameter.grad for name, parameter in thing.named_parameters() if parameter.grad is not None
        }
        return [thing.state_dict(), gradients, [module.training for module in thing.modules()]]
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Equal down to the bits of every tensor."""
    assert type(left) is type(right), where
    if isinstance(left, Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key, value in left.items():
            assert_same(value, right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert left == right, where


def train(
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
) -> list[float]:
    """The plain loop; its losses. The same seed each time, for dropout."""
    torch.manual_seed(1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def loss_of_tokens(model: nn.Module, batch: Any) -> Tensor:
    """Lets the output go before the backward, as transformers' Trainer does."""
    return model(**batch).loss


def loss_of_examples(model: nn.Module, batch: Any) -> Tensor:
    features, classes = batch
    return nn.functional.cross_entropy(model(features), classes)


def budget_for(model: nn.Module, batch: Any, optimizer: Any = None, *, share: float = 0.8) -> int:
    """A share of what two plain steps of a copy peak at."""
    loss_of = loss_of_tokens if hasattr(batch, "keys") else loss_of_examples
    copied, stepped = copy.deepcopy((model, optimizer))
    stepped = stepped or torch.optim.SGD(copied.parameters(), lr=0.0)
    with torch.random.fork_rng(devices=[]):
        return int(share * peak_bytes(lambda: train(copied, stepped, [batch] * 2, loss_of), copied, batch))
