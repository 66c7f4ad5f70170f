"""Which modules `mixed` keeps."""

import pytest
import torch
from torch import Tensor, nn

from serving.errors import ConfigError
from serving.numerics.kept import checked_names, default_kept, forward_order, names_of, output_layers


class Backwards(nn.Module):
    """Registers its head before its body, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """X [rows, 4] -> [rows, 2]."""
        return self.head(self.body(x))


class LoopedHead(nn.Module):
    """Applies its only linear layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """X [rows, 4] -> [rows, 4]."""
        return self.head(self.head(x).relu())


def test_output_layer_is_the_last_executed() -> None:
    """The order of execution decides; without an example that of registration."""
    module = Backwards().eval()
    example = [torch.zeros(1, 4)]
    assert default_kept(module, forward_order(module, example)) == ("head", "body.1")
    assert default_kept(module, forward_order(module, None)) == ("body.1", "body.2")


def test_leaves_after_the_output_layer_belong_to_it() -> None:
    """A softmax at the end doesn't displace the linear layer before it."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Softmax(-1)).eval()
    assert default_kept(module, forward_order(module, [torch.zeros(1, 4)])) == ("1", "2")


def test_repeated_head_is_kept_but_cast_back() -> None:
    """A layer that also runs earlier feeds 16-bit modules there."""
    module = LoopedHead().eval()
    layers, wide = output_layers(forward_order(module, [torch.zeros(1, 4)]))
    assert layers == {module.head}
    assert module.head not in wide


def test_foreign_normalisation_is_known_by_name() -> None:
    """A leaf whose class is called a norm is one."""

    class LlamaRMSNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    module = nn.Sequential(LlamaRMSNorm(), nn.Linear(4, 4), nn.Linear(4, 4))
    assert default_kept(module, forward_order(module, [torch.zeros(1, 4)])) == ("0", "2")


def test_forward_order_leaves_no_hooks() -> None:
    """Neither hooks nor a changed fast path stay behind, also when the model raises."""
    module = Backwards().eval()
    fast = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(RuntimeError, match="shapes"):
        forward_order(module, [torch.zeros(1, 5)])
    assert all(not m._forward_hooks for m in module.modules())
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_unknown_name_gets_the_nearest() -> None:
    """A misspelt module is refused with the name that was meant."""
    with pytest.raises(ConfigError, match=r"no module 'heat'; the nearest name is 'head'"):
        checked_names(Backwards(), ["heat"])


def test_names_of_starts_at_the_root() -> None:
    """The model itself has the empty name."""
    module = Backwards()
    assert names_of(module)[module] == ""
