"""``fit`` on models of every kind: never over the budget, as predicted, bit-equal, and less than torch can do."""

from __future__ import annotations

import copy
import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
import zoo
from slowly import slow_but
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup.errors import BudgetError
from recoup.fitting import Fitted
from recoup.measuring import MemoryTracker, Profile
from recoup.model.caches import cached_models


class Case:
    """A model of the benchmarks, measured once."""

    def __init__(self, model: nn.Module, sample: Any, loss: Any = None) -> None:
        self.model, self.sample, self.loss = model, sample, loss

    @functools.cached_property
    def profile(self) -> Profile:
        return recoup.measure(self.model, self.sample, loss=self.loss)

    @property
    def smallest_bytes(self) -> int:
        return recoup.minimum_budget(self.profile)

    def budget_at(self, share: float) -> int:
        """Between the smallest and the plain one."""
        return int(self.smallest_bytes + share * (self.profile.plain_bytes - self.smallest_bytes))

    def fit(self, budget: int, *, race: bool = False) -> Fitted:
        """Without a race unless asked for: a few of many fits are raced, at one budget of every model."""
        return recoup.fit(self.model, self.sample, budget=budget, loss=self.loss, race=race)

    def fit_smallest(self) -> Fitted:
        """At the predicted minimum or, where a real step passes it, at the verified one, which is hardly larger."""
        try:
            return self.fit(self.smallest_bytes)
        except BudgetError as error:
            named, message = error.smallest_bytes, str(error)
        assert "verified on a real step" in message
        assert self.smallest_bytes < named <= 1.02 * self.smallest_bytes
        return self.fit(named)

    def peak_bytes(self) -> int:
        """Of one step as the model stands, residents included."""
        with MemoryTracker() as memory:
            self.loss_of(self.model).backward()
        self.model.zero_grad()
        return self.profile.residents.total_bytes + memory.peak_bytes

    def loss_of(self, model: nn.Module) -> Tensor:
        args, kwargs = (self.sample, {}) if isinstance(self.sample, tuple) else ((self.sample,), {})
        if isinstance(self.sample, dict):
            args, kwargs = (), self.sample
        output = model(*args, **kwargs)
        if self.loss is not None:
            return self.loss(output)
        return output if isinstance(output, Tensor) else output.loss

    def train(self, model: nn.Module, num_steps: int) -> dict[str, Tensor]:
        """Everything that could differ after a few steps of a copy."""
        model = copy.deepcopy(model)
        torch.manual_seed(7)
        optimizer = torch.optim.AdamW(model.parameters())
        seen: dict[str, Tensor] = {}
        for step in range(num_steps):
            optimizer.zero_grad()
            loss = self.loss_of(model)
            loss.backward()
            seen[f"loss {step}"] = loss.detach()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    seen[f"gradient {step} {name}"] = parameter.grad.clone()
            optimizer.step()
        seen.update(model.state_dict())
        seen["rng"] = torch.get_rng_state()
        return seen

    def assert_trains_the_same(self, num_steps: int = 1) -> None:
        fitted = self.train(self.model, num_steps)
        plain_model = recoup.remove(copy.deepcopy(self.model))
        # As under the plan, and as the verification says: a cache gives keys and values another layout, and products
        # round differently there on some CPUs.
        for module in cached_models(plain_model):
            module.config.use_cache = False
        plain = self.train(plain_model, num_steps)
        assert fitted.keys() == plain.keys()
        for name, value in plain.items():
            assert torch.equal(value, fitted[name]), name


@functools.cache
def case_of(name: str) -> Case:
    torch.manual_seed(0)
    return Case(*zoo.MODELS[name](False))


@functools.cache
def fitted_at(name: str, share: float) -> Fitted:
    """A fit between the smallest and the plain budget; its plan is off the model again."""
    case = case_of(name)
    budget = case.budget_at(share)
    if name.startswith("LSTM") and share == 0:
        budget += 200_000  # its replays are nested as deep as it has steps at the very edge: that takes long
        share = 0.1
    fitted = case.fit(budget, race=share == 0.5) if share else case.fit_smallest()
    recoup.remove(case.model)
    return fitted


@pytest.mark.parametrize("share", slow_but([0.0, 0.5], [0.0, 0.5, 0.8]))
@pytest.mark.parametrize("name", zoo.MODELS)
def test_models(name: str, share: float) -> None:
    case, fitted = case_of(name), fitted_at(name, share)
    seen = fitted.verification
    assert seen is not None
    assert seen.peak_bytes <= fitted.plan.budget_bytes
    assert seen.gradients == "bit-equal"
    assert seen.drifting == ()
    assert not fitted.plan.keeps_everything
    assert abs(fitted.plan.predicted_bytes / seen.peak_bytes - 1) <= 0.01
    recoup.apply(case.model, fitted.plan)
    case.assert_trains_the_same()
    recoup.remove(case.model)


@pytest.mark.parametrize("name", ["GPT, dropout, tied", "ResNet, BatchNorm", "Llama"])
def test_a_smaller_budget_never_uses_more_memory(name: str) -> None:
    case = case_of(name)
    peaks = []
    for step in range(6):
        plan = recoup.plan(case.profile, case.budget_at(0.02 + 0.98 * step / 5))
        recoup.apply(case.model, plan)
        peaks.append(case.peak_bytes())
        assert peaks[-1] <= plan.budget_bytes
    recoup.remove(case.model)
    assert all(small <= large for small, large in pairwise(peaks)), peaks


# When the plain step does not fit


def test_under_a_hard_cap() -> None:
    """Measured, planned and verified in the budget's own memory: nothing ever needs more."""
    case = case_of("GPT")
    budget = case.budget_at(0.5)
    residents = case.profile.residents.total_bytes
    limit = budget - residents
    with pytest.raises(torch.OutOfMemoryError), MemoryTracker(limit_bytes=limit):
        case.loss_of(case.model).backward()
    case.model.zero_grad()
    with MemoryTracker(limit_bytes=limit) as memory:
        fitted = recoup.fit(case.model, case.sample, budget=budget, loss=case.loss)
        case.loss_of(case.model).backward()
    case.model.zero_grad()
    assert memory.peak_bytes <= limit
    assert fitted.verification.gradients == "bit-equal, unit by unit"
    assert fitted.verification.plain_peak_bytes is None
    assert fitted.verification.peak_bytes <= budget
    case.assert_trains_the_same()
    recoup.remove(case.model)


# Models from outside


SMALL = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
OUTSIDE: dict[str, tuple[str, dict[str, int]]] = {
    "GPT-2": (
        "GPT2LMHeadModel",
        {"vocab_size": 90, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32},
    ),
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "BERT": ("BertForMaskedLM", SMALL),
    "ViT": ("ViTForImageClassification", {**SMALL, "image_size": 20, "patch_size": 4}),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 90, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 3,
         "decoder_start_token_id": 0},
    ),
    # Its blocks return attention weights that nobody uses.
    "GPT-J": (
        "GPTJForCausalLM",
        {"vocab_size": 90, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4},
    ),
    # It leaves layers out at random.
    "Wav2Vec2": (
        "Wav2Vec2ForSequenceClassification",
        {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
         "intermediate_size": 64, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
         "mask_time_prob": 0.0},
    ),
    # Its hooks collect hidden states that it uses, and are set up in the first forward.
    "Segformer": (
        "SegformerForSemanticSegmentation",
        {"num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
         "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
         "decoder_hidden_size": 32, "num_labels": 3},
    ),
}  # fmt: skip


@functools.cache
def transformers_case(name: str, **changed: int) -> Case:
    """A model of the transformers library with random weights, with some of its options changed."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made, options = OUTSIDE[name]
    kind = getattr(transformers, made)
    model = kind(kind.config_class(**options | changed)).train()
    if name == "ViT":
        return Case(model, {"pixel_values": torch.randn(4, 3, 20, 20), "labels": torch.randint(2, (4,))})
    if name == "Wav2Vec2":
        return Case(model, {"input_values": torch.randn(4, 600), "labels": torch.randint(2, (4,))})
    if name == "Segformer":
        labels = torch.randint(3, (4, 24, 24))
        return Case(model, {"pixel_values": torch.randn(4, 3, 24, 24), "labels": labels})
    tokens = torch.randint(90, (4, 24))
    return Case(model, {"input_ids": tokens, "labels": tokens})


# By how many per cent a prediction may be too high: under some plans these are by up to 1.9.
OUTSIDE_TOLERANCE = {"T5": 2.5, "GPT-J": 2.5, "Wav2Vec2": 2.5, "Segformer": 2.5}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("share", slow_but([0.5, None], [0.8, 0.5, None]))
@pytest.mark.parametrize("name", OUTSIDE)
def test_transformers(name: str, share: float | None) -> None:
    case = transformers_case(name)
    profile = case.profile
    fixed = profile.residents.total_bytes + profile.residents.gradient_bytes
    state = set(case.model.state_dict())
    if share is None:
        fitted = case.fit_smallest()
    else:
        fitted = case.fit(int(fixed + share * profile.activation_bytes), race=share == 0.5)
    seen = fitted.verification
    assert seen.peak_bytes <= fitted.plan.budget_bytes
    # An encoder has the switch, and fills no cache.
    has_cache = name != "BERT" and bool(cached_models(recoup.remove(copy.deepcopy(case.model))))
    assert seen.gradients == f"bit-equal{' to a step with use_cache off' if has_cache else ''}"
    assert seen.drifting == ()
    error = 100 * (fitted.plan.predicted_bytes / seen.peak_bytes - 1)
    assert -1.0 <= error <= OUTSIDE_TOLERANCE.get(name, 1.0)
    assert set(case.model.state_dict()) == state
    case.assert_trains_the_same()
    recoup.remove(case.model)


def resnet_case(layer_type: str) -> Case:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type=layer_type, num_labels=3
    )
    model = transformers.ResNetForImageClassification(config).train()
    return Case(model, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(3, (4,))})


@pytest.mark.parametrize("layer_type", ["basic", "bottleneck"])
def test_a_resnet_of_transformers_at_its_smallest_budget(layer_type: str) -> None:
    case = resnet_case(layer_type)
    seen = case.fit_smallest()
    assert seen.verification.peak_bytes <= seen.plan.budget_bytes
    assert seen.verification.gradients == "bit-equal"
    case.assert_trains_the_same()


def convolutions() -> Case:
    """Two stages with BatchNorm, whose buffers segments copy."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        for _ in range(6)
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Sequential(*layers[:4]),
        nn.Sequential(*layers[4:]),
        nn.Conv2d(8, 1, 1),
    )
    return Case(model, torch.randn(4, 3, 16, 16), torch.sum)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        convolutions,
        functools.partial(resnet_case, "basic"),
        pytest.param(
            functools.partial(transformers_case, "ViT", num_hidden_layers=2), marks=pytest.mark.slow
        ),
    ],
    ids=["convolutions", "ResNet", "ViT"],
)
def test_a_refusal_names_what_a_real_step_took_whatever_was_asked(make: Any) -> None:
    case = make()

    def named(budget: int) -> int:
        with pytest.raises(BudgetError, match="verified on a real step") as caught:
            case.fit(budget)
        return caught.value.smallest_bytes

    smallest = named(1)
    assert named(case.profile.residents.optimizer_peak_bytes + 1) == named(smallest - 1) == smallest
    assert case.fit(smallest).verification.peak_bytes == smallest
    recoup.remove(case.model)


# Against torch's checkpoint on every block


def torch_peak(case: Case, blocks: list[nn.Module]) -> int:
    """Of a step with torch's checkpoint on every block, residents included."""

    def checkpointed(block: nn.Module) -> Any:
        forward = block.forward
        return lambda *args: torch_checkpoint(forward, *args, use_reentrant=False)

    for block in blocks:
        block.forward = checkpointed(block)  # type: ignore[method-assign]
    peak_bytes = case.peak_bytes()
    for block in blocks:
        del block.forward
    return peak_bytes


@functools.cache
def chain(num_units: int) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(num_units)))
    return Case(model, torch.randn(256, 32), zoo.mean_square)


@pytest.mark.parametrize("name", slow_but(["GPT", "U-Net, skips"], ["GPT", "U-Net, skips", "chain"]))
def test_the_smallest_budget_is_below_a_checkpoint_on_every_block(name: str) -> None:
    case = chain(60) if name == "chain" else case_of(name)
    if name == "chain":
        blocks = list(case.model)
    elif name == "GPT":
        blocks = list(case.model.blocks)
    else:
        blocks = [module for module in case.model.modules() if isinstance(module, zoo.DoubleConv)]
    fitted = case.fit_smallest() if name == "chain" else fitted_at(name, 0.0)
    recoup.remove(case.model)
    peak_bytes = torch_peak(case, blocks)
    assert fitted.verification.peak_bytes < peak_bytes
    assert fitted.verification.gradients == "bit-equal"


# Depth


@pytest.mark.slow
def test_a_thousand_units_train_in_a_small_part_of_their_memory() -> None:
    case = chain(1000)
    activation_bytes = case.profile.activation_bytes
    fixed = case.profile.plain_bytes - activation_bytes
    fitted = case.fit(fixed + activation_bytes // 12)
    assert fitted.verification.gradients == "bit-equal"
    assert fitted.verification.peak_bytes <= fitted.plan.budget_bytes
    assert sum(fitted.plan.schedule.predicted.num_recomputes) < 2 * 1000
    case.assert_trains_the_same()
    recoup.remove(case.model)
