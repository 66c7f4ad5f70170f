"""Weights of 16 bits, arithmetic of 32."""

import pytest
import torch
from torch import Tensor, nn

from serving.errors import ConfigError
from serving.numerics.conversion import convert
from serving.numerics.devices import Cpu, Device
from serving.numerics.precision import PrecisionSpec, WeightFormat
from serving.numerics.scheme import Scheme
from serving.numerics.tier_module import TierModule

LAYERCAST = PrecisionSpec("layercast")


@pytest.fixture
def storing(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A CPU that stores layercast weights as GPUs and NPUs do: 16 bits wide."""
    original = Scheme.__init__

    def init(self: Scheme, *args: object, **kwargs: object) -> None:
        original(self, *args, **{**kwargs, "stores_narrow": True})

    monkeypatch.setattr(Scheme, "__init__", init)
    return Cpu(1)


def weight_bytes(tier: TierModule) -> int:
    """Memory of all weights and floating point buffers."""
    tensors = [*tier.module.parameters(), *tier.module.buffers()]
    return sum(t.nbytes for t in tensors if t.is_floating_point())


def network() -> nn.Sequential:
    """Convolution, normalisation with running statistics, linear."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    ).eval()


@pytest.mark.parametrize("weights", ["fp16", "bf16"])
def test_weights_are_rounded_and_nothing_else(device: Device, weights: WeightFormat) -> None:
    """Equal to FP32 arithmetic on rounded weights and buffers, bit for bit."""
    module, x = network(), torch.randn(2, 3, 8, 8)
    module[1].running_mean.uniform_()
    tier = convert(module, PrecisionSpec("layercast", weights=weights), device, [x])
    dtype = torch.float16 if weights == "fp16" else torch.bfloat16
    rounded = {
        name: value.to(dtype).float() if value.is_floating_point() else value
        for name, value in module.state_dict().items()
    }
    before = module(x)
    module.load_state_dict(rounded)
    assert torch.equal(tier(x), module(x))
    assert not torch.equal(before, module(x))


def test_stored_weights_halve_the_memory(device: Device, storing: Device) -> None:
    """The same answer from half the bytes, before, after and between passes."""
    module, x = network(), torch.randn(2, 3, 8, 8)
    stored = convert(module, LAYERCAST, storing, [x])
    assert weight_bytes(stored) * 2 == sum(
        t.nbytes for t in module.state_dict().values() if t.is_floating_point()
    )
    y = stored(x)
    assert all(t.dtype is torch.float16 for t in stored.module.parameters())
    assert torch.equal(stored(x), y)
    exact = {
        name: value.half().float() if value.is_floating_point() else value
        for name, value in module.state_dict().items()
    }
    module.load_state_dict(exact)
    assert torch.equal(module(x), y)


class Tagger(nn.Module):
    """A recurrent layer, attention that never calls its `out_proj`, and a tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [rows, tokens] -> logits [rows, tokens, 20]."""
        x, _ = self.lstm(self.embedding(ids))
        x, _ = self.attention(x, x, x)
        return nn.functional.linear(x, self.embedding.weight)


def test_weights_that_are_read_without_a_call(storing: Device) -> None:
    """Each is widened by whoever reads it, the tied one by the whole model."""
    module, ids = Tagger().eval(), torch.arange(6)[None]
    tier = convert(module, LAYERCAST, storing, [ids])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.half())
    assert torch.allclose(tier(ids), module(ids), atol=1e-6)
    assert all(t.dtype is torch.float16 for t in tier.module.parameters())


def test_narrow_weights_return_after_an_exception(storing: Device) -> None:
    """A pass that raises leaves the 16-bit weights in place, and the next one works."""
    module, x = network(), torch.randn(2, 3, 8, 8)
    tier = convert(module, LAYERCAST, storing, [x])
    y = tier(x)
    with pytest.raises(RuntimeError, match="channels"):
        tier(torch.randn(2, 4, 8, 8))
    assert all(t.dtype is torch.float16 for t in tier.module.parameters())
    assert torch.equal(tier(x), y)


@pytest.mark.parametrize("stored", [False, True])
def test_lossy_weights_keep_32_bits(device: Device, stored: bool, request: pytest.FixtureRequest) -> None:
    """A variance beyond FP16's range stays as it is, and is reported."""
    target = request.getfixturevalue("storing") if stored else device
    module, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(3, 4)
    module[1].running_var.fill_(497160.0)
    tier = convert(module, LAYERCAST, target, [x])
    assert tier.kept_fp32 == ("1",)
    assert [loss.name for loss in tier.weight_losses] == ["1.running_var"]
    assert (tier.module[1].running_var == 497160).all()
    assert torch.allclose(tier(x), module(x), rtol=1e-2, atol=1e-5)


def test_torchscript_cannot_be_stored_narrow(storing: Device) -> None:
    """Its calls cannot be seen."""
    script = torch.jit.ScriptModule()
    with pytest.raises(ConfigError, match="TorchScript"):
        convert(nn.Sequential(script, nn.Linear(2, 2)), LAYERCAST, storing)
