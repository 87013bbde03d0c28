from __future__ import annotations

from types import SimpleNamespace

import torch
from tally import Tally
from torch import Tensor, nn

from recoup.measuring import measure
from recoup.model.caches import CachelessForward, cached_models, without_caches


class Decoder(nn.Module):
    """Fills a cache unless told not to, as decoders of the transformers library do."""

    def __init__(self, use_cache: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=use_cache)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, use_cache: bool | None = None) -> tuple[Tensor, bool]:
        return self.layer(x), self.config.use_cache if use_cache is None else use_cache


X = torch.randn(3, 6)


def test_off_while_training_unless_the_caller_says_otherwise() -> None:
    model = nn.Sequential(Decoder())
    assert model(X)[1] is True
    with without_caches(model):
        assert model(X)[1] is False
        assert model[0](X, use_cache=None)[1] is False
        assert model[0](X, use_cache=True)[1] is True
        with torch.no_grad():
            assert model(X)[1] is True
    assert model(X)[1] is True
    assert "forward" not in vars(model[0])


def test_it_knows_whether_it_has_switched_anything_off() -> None:
    model = Decoder()
    switch = CachelessForward(model)
    with torch.no_grad():
        switch(X)
    switch(X, use_cache=True)
    assert not switch.has_switched
    assert switch(X)[1] is False
    assert switch.has_switched


def test_an_encoder_has_nothing_to_switch_off() -> None:
    class Encoder(Decoder):
        def forward(self, x: Tensor, use_cache: bool | None = None) -> tuple[Tensor, bool]:
            return super().forward(x, use_cache if self.config.is_decoder else False)

    model = Encoder()
    for is_decoder in (False, True):
        model.config.is_decoder = is_decoder
        switch = CachelessForward(model)
        assert switch(X)[1] is False
        assert switch.has_switched is is_decoder


def test_a_positional_argument_is_the_callers_word() -> None:
    model = Decoder()
    with without_caches(model):
        assert model(X, True)[1] is True


class Layer(Decoder):
    def forward(self, x: Tensor, use_cache: bool | None = False) -> tuple[Tensor, bool]:
        return super().forward(x, use_cache)


def test_models_without_a_cache() -> None:
    assert cached_models(nn.Sequential(Decoder(use_cache=False), Layer(), nn.Linear(6, 6))) == []


def test_measuring_switches_it_off() -> None:
    seen = Tally()

    def loss(output: tuple[Tensor, bool]) -> Tensor:
        if torch.is_grad_enabled():
            seen.add(output[1])
        return output[0].sum()

    measure(Decoder(), X, loss=loss)
    used = seen.take()
    assert used
    assert not any(used)
