"""What a converted module looks like from outside."""

from collections import namedtuple

import torch
from torch import nn

from serving.numerics.conversion import convert
from serving.numerics.devices import Device
from serving.numerics.precision import PrecisionSpec
from serving.numerics.tier_module import map_floats

Pair = namedtuple("Pair", ["a", "b"])


def test_description(device: Device) -> None:
    """A tier says in what it computes and whether that is emulated."""
    module = nn.Linear(4, 4).eval()
    tier = convert(module, PrecisionSpec("bf16"), device)
    assert (tier.dtype, tier.emulated, tier.kept_fp32, tier.weight_losses) == (torch.bfloat16, True, (), ())
    native = convert(module, PrecisionSpec("fp16", native=True), device)
    assert not native.emulated
    assert convert(module, PrecisionSpec("fp32"), device).module is module


def test_no_gradients(device: Device) -> None:
    """Nothing is recorded for a backward pass."""
    for kind in ("fp32", "fp16"):
        assert not convert(nn.Linear(4, 4), PrecisionSpec(kind), device)(torch.ones(1, 4)).requires_grad


def test_eval_mode(device: Device) -> None:
    """A module left in training mode is served in eval mode: dropout does nothing."""
    tier = convert(nn.Sequential(nn.Dropout(0.9)), PrecisionSpec("fp16"), device)
    assert torch.equal(tier(torch.ones(64)), torch.ones(64))


def test_in_place_model_spares_the_caller(device: Device) -> None:
    """A 16-bit tier works on rounded copies, so a model that writes to its input writes to those."""
    x = torch.full((4,), -1.0)
    y = convert(nn.Sequential(nn.ReLU(inplace=True)), PrecisionSpec("fp16"), device)(x)
    assert y.tolist() == [0, 0, 0, 0]
    assert x.tolist() == [-1, -1, -1, -1]


def test_map_floats_keeps_structure() -> None:
    """Named tuples stay named, what is no float tensor stays itself."""
    value = Pair([torch.ones(1), "text"], {"n": torch.tensor(1)})
    mapped = map_floats(value, lambda tensor: tensor * 2)
    assert isinstance(mapped, Pair)
    assert mapped.a[0].item() == 2
    assert mapped.a[1] == "text"
    assert mapped.b["n"].item() == 1
