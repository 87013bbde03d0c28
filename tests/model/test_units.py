from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import transformers
import zoo
from torch import Tensor, nn

from recoup.errors import UnitError
from recoup.model.calls import kind_of_module, watch_calls
from recoup.model.slices import unit_names
from recoup.model.step import TrainingStep
from recoup.model.units import Units, children_of, choose_units, find_units


def chosen(model: nn.Module, sample: Any) -> list[str]:
    units = choose_units(watch_calls(TrainingStep(model, sample)))
    names = unit_names(model, units)
    return [names[module] for module in units]


def found(model: nn.Module, sample: Any, wanted: Any) -> list[str]:
    units = find_units(watch_calls(TrainingStep(model, sample)), wanted)
    names = unit_names(model, units)
    return [names[module] for module in units]


BLOCKS = [f"blocks.{index}" for index in range(6)]
STAGES = [f"stages.{stage}.{index}" for stage in range(3) for index in range(4)]


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("GPT", ["embed", "position", *BLOCKS, "norm", "head"]),
        ("GPT, dropout, tied", ["embed", "position", *BLOCKS[:4], "norm", "head"]),
        ("Llama", ["embed", *BLOCKS[:4], "norm", "head"]),
        # Not the stages, each of which is a quarter of the step and more: the blocks in them.
        ("ResNet, BatchNorm", ["stem", *STAGES, "head"]),
        ("U-Net, skips", ["first", "pool", "down.0", "down.1", "down.2", "up.2", "up.1", "up.0", "last"]),
        ("mixture of experts", [f"layers.{index}" for index in range(8)]),
        (
            "encoder-decoder",
            [
                *(f"transformer.encoder.layers.{index}" for index in range(3)),
                "transformer.encoder.norm",
                *(f"transformer.decoder.layers.{index}" for index in range(3)),
                "transformer.decoder.norm",
            ],
        ),
        ("LSTM, shared weights", ["cell", "head"]),
    ],
)
def test_the_units_of_models_that_people_train(name: str, units: list[str]) -> None:
    model, sample, _ = zoo.MODELS[name](False)
    assert chosen(model, sample) == units


@pytest.mark.parametrize(
    ("kind", "units"),
    [
        (models.GPT, ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]),
        (models.ResNet, ["stem", "blocks.0", "blocks.1", "blocks.2"]),
        (models.UNet, ["down.0", "down.1", "middle", "up.0", "up.1"]),
        (models.MoE, ["layers.0", "layers.1", "layers.2"]),
        (models.EncoderDecoder, ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]),
        (models.Recurrent, ["cell"]),
    ],
)
def test_the_units_of_small_models(kind: Any, units: list[str]) -> None:
    assert chosen(kind(models.plainly), kind.sample()) == units


def test_one_giant_block_is_split() -> None:
    body = nn.Sequential(nn.Linear(6, 100), nn.GELU(), nn.Linear(100, 6))
    assert chosen(nn.Sequential(nn.Linear(6, 6), body), torch.zeros(4, 6)) == ["0", "1[0:2]", "1.2"]


def test_a_small_block_beside_a_large_one_is_a_unit() -> None:
    small = nn.Sequential(nn.Linear(100, 2), nn.GELU(), nn.Linear(2, 4))
    model = nn.Sequential(nn.Linear(6, 100), nn.Tanh(), small)
    assert chosen(model, torch.zeros(4, 6)) == ["[0:2]", "2"]


def test_a_model_that_is_one_leaf_is_the_unit() -> None:
    assert chosen(nn.Linear(6, 3), torch.zeros(4, 6)) == [""]


def test_blocks_deep_in_the_tree_at_the_outermost_level() -> None:
    def block() -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Linear(6, 6), nn.GELU()), nn.Sequential(nn.Linear(6, 6), nn.GELU())
        )

    model = nn.Sequential(nn.Sequential(nn.Sequential(block(), block())), nn.Linear(6, 2))
    assert chosen(model, torch.zeros(4, 6)) == ["0.0.0", "0.0.1", "1"]


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Residual(nn.Module):
    """What it holds is up to its user."""

    def __init__(self, inside: nn.Module, scale: nn.Module | None = None) -> None:
        super().__init__()
        self.inside, self.scale = inside, scale

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.scale is None else self.scale(x)
        return x + self.inside(x)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    "other",
    [lambda: Residual(Feed(), nn.Linear(6, 6)), lambda: frozen(Residual(Feed()))],
    ids=["a layer more", "frozen"],
)
@pytest.mark.parametrize("position", [0, 1, 3])
def test_a_block_that_is_unlike_those_beside_it(other: Callable[[], nn.Module], position: int) -> None:
    blocks = [Residual(Feed()) for _ in range(3)]
    blocks.insert(position, other())
    model = nn.Sequential(nn.Linear(6, 6), *blocks, nn.Linear(6, 2))
    assert chosen(model, torch.zeros(4, 6)) == [str(index) for index in range(6)]


def test_blocks_of_transformers_that_are_unlike_those_beside_them() -> None:
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 4, "num_layers": 3, "num_heads": 4, "vocab_size": 20}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    tokens = torch.zeros(2, 6, dtype=torch.long)
    blocks = [f"{part}.block.{index}" for part in ("encoder", "decoder") for index in range(3)]
    assert [name for name in chosen(t5, {"input_ids": tokens, "labels": tokens}) if "block" in name] == blocks
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[3, 3])
    resnet = transformers.ResNetForImageClassification(config)
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}
    layers = [f"resnet.encoder.stages.{stage}.layers.{index}" for stage in range(2) for index in range(3)]
    assert [name for name in chosen(resnet, pixels) if "stages" in name] == layers


@pytest.mark.parametrize("num_blocks", [2, 4])
def test_a_module_with_blocks_of_its_class_inside_is_none(num_blocks: int) -> None:
    holding = Residual(nn.Sequential(*(Residual(Feed()) for _ in range(num_blocks))))
    model = nn.Sequential(Residual(Feed()), Residual(Feed()), holding)
    inside = [f"2.inside.{index}" for index in range(num_blocks)]
    assert chosen(model, torch.zeros(4, 6)) == ["0", "1", *inside]


class Stage(nn.Module):
    """What users write for a row of blocks."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Row(nn.Sequential):
    """A container by another name."""


@pytest.mark.parametrize("kind", [Stage, Row, nn.Sequential])
@pytest.mark.parametrize("num_blocks", [3, 4, 11])
def test_a_stage_with_more_blocks_than_those_beside_it_is_none(kind: Any, num_blocks: int) -> None:
    model = nn.Sequential(*(kind(*(Feed() for _ in range(count))) for count in (2, 2, num_blocks)))
    inside = [f"2.{'layers.' if kind is Stage else ''}{index}" for index in range(num_blocks)]
    assert chosen(model, torch.zeros(4, 6)) == ["0", "1", *inside]


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return x


def test_blocks_that_differ_in_what_has_no_parameters() -> None:
    class Path(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate = rate

        def extra_repr(self) -> str:
            return f"rate={self.rate}"

        def forward(self, x: Tensor) -> Tensor:
            return x * (torch.rand(len(x), 1) > self.rate)

    class Block(nn.Module):
        def __init__(self, rate: float, width: int) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)
            self.path = Path(rate) if rate else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.path(self.layer(self.norm(x)).tanh())

    stages = [
        nn.Sequential(*(Block(0.1 * (index + 2 * stage), 8 + 4 * stage) for index in range(2)))
        for stage in range(2)
    ]
    model = nn.Sequential(stages[0], nn.Linear(8, 12), stages[1])
    assert chosen(model, torch.randn(5, 8)) == ["0.0", "0.1", "1", "2.0", "2.1"]


def test_a_block_that_is_called_again_is_one_unit() -> None:
    assert chosen(Repeated(), torch.zeros(4, 6)) == ["block"]


def test_settings_and_shapes_make_a_kind() -> None:
    same = [kind_of_module(nn.Dropout(0.1)), kind_of_module(nn.Dropout(0.1))]
    assert same[0] == same[1]
    assert kind_of_module(nn.Dropout(0.2)) != same[0]
    assert kind_of_module(nn.Linear(3, 4)) != kind_of_module(nn.Linear(4, 3))
    assert kind_of_module(nn.Linear(3, 4)) != kind_of_module(nn.Linear(3, 4).double())
    assert kind_of_module(nn.Linear(3, 4)) != kind_of_module(nn.Linear(3, 4).requires_grad_(False))


class TestFind:
    def make(self) -> tuple[nn.Module, Tensor]:
        model = models.GPT(models.plainly)
        return model, model.sample()[0]

    @pytest.mark.parametrize(
        ("units", "expected"),
        [
            ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"]),
            ("blocks.[02]", ["blocks.0", "blocks.2"]),
            (["blocks.2", "embed"], ["embed", "blocks.2"]),
            (lambda name, module: isinstance(module, nn.Embedding), ["embed"]),
            (nn.Embedding, ["embed"]),
            ([nn.Embedding, "head"], ["embed", "head"]),
            (("blocks.1", lambda name, module: name == "head"), ["blocks.1", "head"]),
            # A star does not cross a dot: these are no blocks.
            ("*", ["embed", "head"]),
            ("blocks.*.up", ["blocks.0.up", "blocks.1.up", "blocks.2.up"]),
        ],
    )
    def test_by_pattern_and_predicate(self, units: Units, expected: list[str]) -> None:
        model, sample = self.make()
        assert found(model, sample, units) == expected

    def test_by_module(self) -> None:
        model, sample = self.make()
        assert found(model, sample, model.blocks[1]) == ["blocks.1"]
        assert found(model, sample, list(model.blocks)) == ["blocks.0", "blocks.1", "blocks.2"]

    @pytest.mark.parametrize(
        ("units", "text"),
        [
            ("block.1", r"'block.1' fits no module of the model. Did you mean 'blocks.1'"),
            ("zzz", r"'zzz' fits no module of the model. The first names are: blocks, blocks.0,"),
            (nn.Linear(2, 2), r"The module Linear\(…\) fits no module"),
            (nn.LSTM, r"The class LSTM fits no module"),
            (lambda name, module: False, r"The predicate for units fits no module"),
            ("blocks", r"'blocks' fits 'blocks', which the step never calls.*name what is in them"),
            (
                ["blocks.0", "blocks.0.up"],
                r"Unit 'blocks.0.up' lies inside another unit. Name either the outer or",
            ),
        ],
    )
    def test_what_is_not_there(self, units: Any, text: str) -> None:
        model, sample = self.make()
        with pytest.raises(UnitError, match=text):
            found(model, sample, units)

    def test_no_units_at_all(self) -> None:
        model, sample = self.make()
        with pytest.raises(UnitError, match=r"units= names nothing"):
            found(model, sample, [])

    def test_the_whole_model_as_a_unit(self) -> None:
        model, sample = self.make()
        assert found(model, sample, model) == [""]


def test_what_a_unit_is_split_into() -> None:
    model = models.GPT(models.plainly)
    root = watch_calls(TrainingStep(model, model.sample()))
    names: Callable[[nn.Module], dict[nn.Module, str]] = lambda module: {  # noqa: E731
        child: name for name, child in module.named_modules()
    }
    inside = [names(model.blocks[0])[child] for child in children_of(root, model.blocks[0])]
    assert inside == ["norm1", "attention", "norm2", "up", "down", "dropout"]
    assert children_of(root, model.embed) == []
    assert children_of(root, model.blocks) == []


def test_bytes_made_in_each_call() -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.Sequential(nn.Tanh(), nn.Linear(10, 3)))
    root = watch_calls(TrainingStep(model, torch.zeros(4, 6)))
    made = {call.name: call.made_bytes for call in root.walk()}
    assert made == {"": 160 + 160 + 48, "0": 160, "1": 160 + 48, "1.0": 160, "1.1": 48}
