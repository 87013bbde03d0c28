"""Networks for images as torchvision builds them, written by hand in a size for a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from made_up.parts import Subject, images, mean_square
from models import MODELS, Residual
from torch import Tensor, nn

__all__ = ["VISION"]


class Bottleneck(nn.Module):
    """ResNet-50's block: 1x1, 3x3, 1x1 and the input, perhaps projected, added."""

    def __init__(self, num_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        num_out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, num_out, 1, bias=False), nn.BatchNorm2d(num_out)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride > 1 or num_in != num_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += identity
        return self.relu(y)


class ResNet(nn.Module):
    """ResNet: a stem with pooling, four stages, an average, and a classifier."""

    def __init__(
        self, make: Callable[[int, int, int], nn.Module], depths: list[int], widths: list[int]
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0])
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        num_in = widths[0]
        for index, (depth, width) in enumerate(zip(depths, widths[1:], strict=True)):
            growth = 4 if make is Bottleneck else 1
            blocks = [make(num_in, width, 1 if index == 0 else 2)]
            num_in = growth * width
            blocks += [make(num_in, width, 1) for _ in range(depth - 1)]
            self.add_module(f"layer{index + 1}", nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(num_in, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # type: ignore[operator]
        return self.fc(torch.flatten(self.avgpool(x), 1))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project."""

    def __init__(self, num_in: int, num_out: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = num_in * expand
        layers: list[nn.Module] = [] if expand == 1 else [conv_norm(num_in, hidden, 1)]
        layers += [
            conv_norm(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, num_out, 1, bias=False),
        ]
        self.conv = nn.Sequential(*layers, nn.BatchNorm2d(num_out))
        self.adds = stride == 1 and num_in == num_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


def conv_norm(num_in: int, num_out: int, size: int, stride: int = 1, groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(num_out),
        nn.ReLU6(inplace=True),
    )


class MobileNet(nn.Module):
    """MobileNetV2: one row of blocks in ``features``, and a classifier with dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        features: list[nn.Module] = [conv_norm(3, width, 3, 2)]
        num_in = width
        for expand, num_out, depth, stride in ((1, 8, 1, 1), (6, 12, 2, 1), (6, 16, 3, 2), (6, 32, 3, 2)):
            for index in range(depth):
                features.append(InvertedResidual(num_in, num_out, stride if index == 0 else 1, expand))
                num_in = num_out
        features.append(conv_norm(num_in, 64, 1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


class DenseLayer(nn.Module):
    """DenseNet's layer: takes all outputs so far as a list."""

    def __init__(self, num_in: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(num_in), nn.Conv2d(num_in, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = (
            nn.BatchNorm2d(4 * growth),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, found: list[Tensor]) -> Tensor:
        y = self.conv1(self.relu(self.norm1(torch.cat(found, 1))))
        return self.conv2(self.relu(self.norm2(y)))


class DenseBlock(nn.ModuleDict):
    """Layers that are each fed with all outputs before them."""

    def __init__(self, num_layers: int, num_in: int, growth: int) -> None:
        super().__init__(
            {f"denselayer{i + 1}": DenseLayer(num_in + i * growth, growth) for i in range(num_layers)}
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.values():
            found.append(layer(found))
        return torch.cat(found, 1)


class DenseNet(nn.Module):
    """DenseNet: dense blocks with transitions that halve."""

    def __init__(self, growth: int = 8, depths: tuple[int, ...] = (4, 6, 4)) -> None:
        super().__init__()
        num = 2 * growth
        layers: list[nn.Module] = [
            nn.Conv2d(3, num, 3, 1, 1, bias=False),
            nn.BatchNorm2d(num),
            nn.ReLU(inplace=True),
        ]
        for index, depth in enumerate(depths):
            layers.append(DenseBlock(depth, num, growth))
            num += depth * growth
            if index < len(depths) - 1:
                layers.append(
                    nn.Sequential(
                        nn.BatchNorm2d(num),
                        nn.ReLU(inplace=True),
                        nn.Conv2d(num, num // 2, 1, bias=False),
                        nn.AvgPool2d(2),
                    )
                )
                num //= 2
        self.features, self.classifier = nn.Sequential(*layers, nn.BatchNorm2d(num)), nn.Linear(num, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.features(x), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(y, 1).flatten(1))


class Vgg(nn.Module):
    """VGG: convolutions with activations in place, pooling, and a wide classifier."""

    def __init__(self, *, norm: bool, width: int = 12) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        num_in = 3
        for factor in (1, 1, 0, 2, 2, 0, 4, 4, 0):
            if factor == 0:
                layers.append(nn.MaxPool2d(2, 2))
                continue
            layers.append(nn.Conv2d(num_in, factor * width, 3, padding=1))
            if norm:
                layers.append(nn.BatchNorm2d(factor * width))
            layers.append(nn.ReLU(True))
            num_in = factor * width
        self.features, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(4 * num_in, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 64), nn.ReLU(True), nn.Dropout(),
            nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class Inception(nn.Module):
    """GoogLeNet's block: branches over one input, concatenated."""

    def __init__(self, num_in: int, width: int) -> None:
        super().__init__()
        self.branch1 = conv_norm(num_in, width, 1)
        self.branch2 = nn.Sequential(conv_norm(num_in, width, 1), conv_norm(width, 2 * width, 3))
        self.branch3 = nn.Sequential(conv_norm(num_in, width, 1), conv_norm(width, width, 3))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_norm(num_in, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class GoogLeNet(nn.Module):
    """Inception blocks, and an auxiliary head in the middle."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = conv_norm(3, 5 * width, 3, 2)
        self.blocks = nn.ModuleList(Inception(5 * width, width) for _ in range(5))
        self.aux, self.fc = nn.Linear(5 * width, 10), nn.Linear(5 * width, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 2:
                aux = self.aux(x.mean((2, 3)))
        return self.fc(x.mean((2, 3))), aux


def _of(make: Callable[[], nn.Module], size: int = 32, batch: int = 8) -> Callable[[int], Subject]:
    return lambda scale: Subject(make(), images(scale, size, batch), mean_square)


def _small_resnet(scale: int) -> Subject:
    case = MODELS["ResNet, BatchNorm"](scale > 1)
    return Subject(case.model, case.sample, case.loss)


VISION: dict[str, Callable[[int], Subject]] = {
    "ResNet of three stages": _small_resnet,
    "ResNet-18": _of(lambda: ResNet(Residual, [2, 2, 2, 2], [16, 16, 24, 32, 48]), 64),
    "ResNet-50": _of(lambda: ResNet(Bottleneck, [3, 4, 6, 3], [16, 8, 12, 16, 20]), 64),
    "MobileNetV2": _of(MobileNet, 48),
    "DenseNet": _of(DenseNet, 24, 4),
    "VGG": _of(lambda: Vgg(norm=False)),
    "VGG, BatchNorm": _of(lambda: Vgg(norm=True)),
    "GoogLeNet": _of(GoogLeNet),
}
