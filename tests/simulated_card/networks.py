"""Small networks for the simulated card, with operators that real models have."""

import ctypes
import os
from pathlib import Path

import torch
from torch import nn

CHANNELS, SIDE = 3, 16
#: Names a file: the process that gets to remove it breaks its card, and no other, so that a batch
#: that is retried breaks one card.
TRIGGER = "SIMULATED_CARD_TRIGGER"
#: What a row of `served` starts with to break the card in the middle of the batch.
BREAK = -1000.0
#: The same, once the row has been computed: the next batch would find out.
BREAK_AFTERWARDS = -2000.0
#: Rows of `served` that start with at least this take as many megabytes of memory.
HUNGRY = 100.0
AI_CORE_EXCEPTION = 507015


def set_fault(operator: str, code: int, after: int = 0) -> None:
    """From now on, and after `after` more calls, an operator fails; code 0 ends that."""
    library = ctypes.CDLL("libascendcl.so")
    library.fakeacl_set_fault(operator.encode(), code, ctypes.c_long(after))


class Vision(nn.Module):
    """A convolutional network with everything that small ones have."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(CHANNELS, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, stride=2, groups=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [rows, 3, 16, 16] -> logits [rows, 10]."""
        return self.head(self.features(x).flatten(1))


def vision() -> nn.Module:
    """With fixed weights, and statistics that are not those of a fresh network."""
    generator = torch.Generator().manual_seed(3)
    network = Vision().eval().requires_grad_(False)
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.4 + 0.05)
    return network


class Scale(nn.Module):
    """A product that overflows FP16: 1 is kept, 16384 becomes 65536."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.linear.weight, 4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [rows, 1] -> [rows, 1]."""
        return self.linear(x)


class Narrowed(nn.Module):
    """Rounds its input through FP16 behind casts: FP32 in, FP32 out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X of any shape -> the same."""
        return x.half().float()


class Outer(nn.Module):
    """Needs memory for rows x rows values, twice: 400 MB each at FP16 for 14,000 rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [rows, 1] -> [rows, 1]: the row times the sum of all rows."""
        products = x @ x.T
        halves = products / 2
        return halves.sum(dim=1, keepdim=True)


class Served(nn.Module):
    """`Vision`, which says where it ran, and does to its card what a row's first value asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = vision()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """X [rows, 3, 16, 16] -> logits [rows, 10], and [rows, 3]: visible card, their number, process."""
        firsts = x[:, 0, 0, 0].tolist()
        megabytes = int(sum(first for first in firsts if first >= HUNGRY))
        held = torch.empty(megabytes << 20, dtype=torch.uint8, device=x.device)
        if BREAK in firsts and _may_break():
            # In the middle of this batch.
            set_fault("aclnnConvolution", AI_CORE_EXCEPTION, after=1)
        logits = self.vision(x)
        if BREAK_AFTERWARDS in firsts and _may_break():
            torch.npu.synchronize()
            set_fault("aclnnConvolution", AI_CORE_EXCEPTION)
        del held
        where = [int(os.environ["ASCEND_RT_VISIBLE_DEVICES"]), torch.npu.device_count(), os.getpid()]
        return logits, torch.tensor(where, device=x.device).repeat(len(x), 1)


def _may_break() -> bool:
    """Whether this process is the one to break its card."""
    try:
        Path(os.environ[TRIGGER]).unlink()
    except FileNotFoundError:
        return False
    return True


def served() -> nn.Module:
    """The module that the configuration names."""
    return Served().eval()
