"""Which modules stay FP32 when a module is converted to 16 bits."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from serving.errors import ConfigError

_SENSITIVE = (
    _NormBase,  # every BatchNorm and InstanceNorm
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
    nn.Softmax,
    nn.Softmax2d,
    nn.Softmin,
    nn.LogSoftmax,
    nn.AdaptiveLogSoftmaxWithLoss,
)


@dataclass(frozen=True, slots=True)
class ForwardOrder:
    """The modules that one forward pass went through."""

    #: In the order in which they finished, once per call.
    finished: tuple[nn.Module, ...]

    @property
    def leaves(self) -> tuple[nn.Module, ...]:
        """Those without submodules."""
        return tuple(module for module in self.finished if _is_leaf(module))


def forward_order(module: nn.Module, example: Sequence[torch.Tensor] | None) -> ForwardOrder:
    """The order of execution on an example.

    Without an example, or where TorchScript hides the submodules, the order of registration.
    """
    if example is None or any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        return ForwardOrder(tuple(module.modules()))
    finished: list[nn.Module] = []

    def note(called: nn.Module, args: object, output: object) -> None:
        finished.append(called)

    handles = [m.register_forward_hook(note) for m in module.modules()]
    try:
        with torch.inference_mode(), module_by_module():
            module(*(tensor.clone() for tensor in example))
    finally:
        for handle in handles:
            handle.remove()
    return ForwardOrder(tuple(finished))


@contextmanager
def module_by_module() -> Iterator[None]:
    """Run transformer layers through their submodules.

    torch's fast path for `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` reads their
    submodules' weights without calling them, and runs the layer as one operator.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def output_layers(order: ForwardOrder) -> tuple[set[nn.Module], set[nn.Module]]:
    """The output layer, and the modules whose results are the model's own and stay FP32.

    The output layer is the last leaf that owns parameters, together with the leaves after it
    (a softmax, a flatten). A leaf that also runs earlier feeds 16-bit modules there, so its
    results are cast back. A module that runs once and ends in the last leaf gives the same
    results as that leaf.
    """
    leaves = order.leaves
    if not leaves:
        return set(), set()
    with_parameters = [i for i, leaf in enumerate(leaves) if next(leaf.parameters(), None) is not None]
    last = with_parameters[-1] if with_parameters else len(leaves) - 1
    wide = set(leaves[last:]) - set(leaves[:last])
    layers = wide | {leaves[last]}
    calls = Counter(order.finished)
    around = {m for m, count in calls.items() if count == 1 and leaves[-1] in set(m.modules())}
    return layers, wide | (around if leaves[-1] in wide else set())


def default_kept(module: nn.Module, order: ForwardOrder) -> tuple[str, ...]:
    """What `mixed` keeps by default: the output layer, every normalisation and softmax.

    A module of another library counts as a normalisation if it has no submodules and its
    class is called so, such as `LlamaRMSNorm`.
    """
    names = names_of(module)
    output, _ = output_layers(order)
    sensitive = [m for m in module.modules() if _is_sensitive(m)]
    chosen = output | set(sensitive)
    return tuple(names[m] for m in module.modules() if m in chosen)


def checked_names(module: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """`names` without repetitions, each the name of a module.

    Raises:
        ConfigError: there is no such module; the message holds the nearest name.
    """
    valid = [name for name, _ in module.named_modules(remove_duplicate=False)]
    for name in names:
        if name not in valid:
            nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
            hint = f"; the nearest name is {nearest[0]!r}" if nearest else ""
            raise ConfigError(f"the model has no module {name!r}{hint}", "keep_fp32")
    return tuple(dict.fromkeys(names))


def callable_owner(module: nn.Module, owner: str, order: ForwardOrder) -> str:
    """The nearest module around `owner`, itself included, that a forward pass calls.

    Borders stand where modules are called. `nn.MultiheadAttention` reads the weights of its
    `out_proj` without calling it, so the attention as a whole is kept in its stead.
    """
    named = dict(module.named_modules(remove_duplicate=False))
    while owner and named[owner] not in order.finished:
        owner = owner.rpartition(".")[0]
    return owner


def names_of(module: nn.Module) -> dict[nn.Module, str]:
    """The first name of each module; the root's is the empty string."""
    return {submodule: name for name, submodule in module.named_modules()}


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _is_sensitive(module: nn.Module) -> bool:
    named_so = _is_leaf(module) and "norm" in type(module).__name__.lower()
    return named_so or isinstance(module, _SENSITIVE)
