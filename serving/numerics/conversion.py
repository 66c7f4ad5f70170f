"""Turning an FP32 module into a tier's own.

Weights and floating point buffers are cast once; integers and bools never. Modules that stay
FP32 are given borders, where floating point tensors are cast on the way in and out. No weight
is lost in silence: see `weight_loss`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from serving.errors import ConfigError, PrecisionUnavailable
from serving.numerics.devices.device import Device
from serving.numerics.emulation import Islands
from serving.numerics.kept import (
    ForwardOrder,
    callable_owner,
    checked_names,
    default_kept,
    forward_order,
    names_of,
    output_layers,
)
from serving.numerics.layercast import WideForward
from serving.numerics.precision import PrecisionSpec
from serving.numerics.rounding import rounded
from serving.numerics.scheme import Scheme, scheme_of
from serving.numerics.tier_module import KeptForward, TierModule
from serving.numerics.weight_loss import WeightLoss, weight_loss


def convert(
    module: nn.Module, spec: PrecisionSpec, device: Device, example: Sequence[torch.Tensor] | None = None
) -> TierModule:
    """An FP32 module -> the same model at the precision of `spec`, on `device`.

    At `fp32`, `hf32` and `tf32` the module itself is moved and used. Otherwise a copy is
    converted and `module` keeps its weights.

    Args:
        module: FP32, in eval mode.
        spec: what to convert to.
        device: where the result runs; emulated on a CPU unless `spec.native`.
        example: model inputs, any number of rows, to learn in which order modules execute.
            Without it the order of registration is taken.

    Raises:
        ConfigError: `keep_fp32` names no module, or a TorchScript model has modules to keep.
        PrecisionUnavailable: the device cannot compute so, or weights would be lost and
            `on_weight_loss` is `refuse`; with the reason.
    """
    scheme = scheme_of(spec, device)
    dtype = spec.lower_dtype
    if dtype is None:
        return TierModule(module.to(device.torch_device).eval(), scheme, Islands())
    with torch.no_grad():
        copied = copy.deepcopy(module).to(device.torch_device).eval()
    order = forward_order(copied, example)
    declared = _declared(copied, spec, order)
    losses = _losses(copied, spec, dtype, _subtrees(copied, declared))
    kept = tuple(dict.fromkeys(declared + _lossy_owners(copied, losses, order, spec)))
    inside = _subtrees(copied, kept)
    if spec.kind != "autocast":
        _cast_weights(copied, inside, _caster(dtype, scheme))
    tier = TierModule(copied, scheme, Islands(), kept_fp32=kept, weight_losses=losses)
    if scheme.stores_narrow:
        _widen_on_call(tier, order, example)
    elif scheme.has_borders:
        borders = _set_borders(tier, inside, output_layers(order)[1])
        if example is not None and borders and not scheme.emulated:
            _settle(tier, borders, example)
    return tier


def _declared(module: nn.Module, spec: PrecisionSpec, order: ForwardOrder) -> tuple[str, ...]:
    if spec.keep_fp32 is not None:
        return checked_names(module, spec.keep_fp32)
    return default_kept(module, order) if spec.kind == "mixed" else ()


def _losses(
    module: nn.Module, spec: PrecisionSpec, dtype: torch.dtype, kept: set[nn.Module]
) -> tuple[WeightLoss, ...]:
    """What the cast does to every parameter and buffer outside the kept modules."""
    names = names_of(module)
    found = (
        weight_loss(f"{names[owner]}.{name}".lstrip("."), tensor, dtype)
        for owner, name, tensor in _own_tensors(module.modules())
        if owner not in kept and (spec.kind != "autocast" or _is_operand(owner, tensor))
    )
    return tuple(loss for loss in found if loss is not None)


def _is_operand(owner: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether autocast may lower a weight: those of products and convolutions, with biases.

    They are told by a parameter of two or more dimensions; an embedding is looked up at FP32.
    """
    return (
        isinstance(tensor, nn.Parameter)
        and not isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
        and any(parameter.dim() > 1 for parameter in owner.parameters(recurse=False))
    )


def _lossy_owners(
    module: nn.Module, losses: Iterable[WeightLoss], order: ForwardOrder, spec: PrecisionSpec
) -> tuple[str, ...]:
    """The modules to keep because of their weights.

    Raises:
        PrecisionUnavailable: there is one, and the spec refuses.
    """
    material = [loss for loss in losses if loss.material]
    if material and spec.on_weight_loss == "refuse":
        lost = "; ".join(str(loss) for loss in material)
        raise PrecisionUnavailable(f"conversion to {spec.kind} loses weights: {lost}")
    return tuple(callable_owner(module, loss.name.rpartition(".")[0], order) for loss in material)


def _set_borders(tier: TierModule, inside: set[nn.Module], wide: set[nn.Module]) -> list[KeptForward]:
    """Give every module inside the kept ones its border; a border within another does nothing.

    Raises:
        ConfigError: a kept module is TorchScript, whose calls cannot be seen.
    """
    borders = []
    for module in inside:
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError("a module of a TorchScript model cannot stay FP32 alone; serve the eager model")
        # After autocast's kept modules everything is FP32 by type promotion.
        leaves_wide = module in wide and tier.scheme.spec.kind != "autocast"
        border = KeptForward(module.forward, tier.islands, tier.scheme, wide=leaves_wide)
        # On the instance, not as hooks: `finally` then covers every exception.
        module.__dict__["forward"] = border
        borders.append(border)
    return borders


def _settle(tier: TierModule, borders: list[KeptForward], example: Sequence[torch.Tensor]) -> None:
    """Cast the output layer's results too, where what follows it needs 16 bits.

    A model may go on after its last module, such as with a product by its embedding's 16-bit
    weights, which a 16-bit kernel refuses for an FP32 operand.
    """
    if not _runs(tier, example):
        for border in borders:
            border.wide = False


def _widen_on_call(tier: TierModule, order: ForwardOrder, example: Sequence[torch.Tensor] | None) -> None:
    """Have each module widen its 16-bit weights when it is called.

    A weight that is read without a call to its module is widened by the nearest module around
    it that is called; where even that is not enough, as with a product by an embedding's
    weights, the whole model widens all of them.

    Raises:
        ConfigError: the model is TorchScript, whose calls cannot be seen.
    """
    module = tier.module
    if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        raise ConfigError("a TorchScript model cannot be served as layercast; serve the eager model")
    named, names = dict(module.named_modules(remove_duplicate=False)), names_of(module)
    narrow = [
        owned for owned in _own_tensors(module.modules()) if owned[2].dtype is tier.scheme.spec.lower_dtype
    ]
    callers: dict[nn.Module, list[tuple[nn.Module, str, torch.Tensor]]] = {}
    for owned in narrow:
        callers.setdefault(named[callable_owner(module, names[owned[0]], order)], []).append(owned)
    for caller, of_caller in callers.items():
        caller.__dict__["forward"] = WideForward(caller.forward, of_caller)
    if example is not None and not _runs(tier, example):
        for caller in callers:
            del caller.__dict__["forward"]
        module.__dict__["forward"] = WideForward(module.forward, narrow)


def _runs(tier: TierModule, example: Sequence[torch.Tensor]) -> bool:
    """Whether the example passes without two dtypes meeting in an operator."""
    try:
        tier(*(tensor.clone() for tensor in example))
    except RuntimeError as error:
        if "dtype" not in str(error):
            raise
        return False
    return True


def _subtrees(module: nn.Module, names: Iterable[str]) -> set[nn.Module]:
    named = dict(module.named_modules(remove_duplicate=False))
    return {below for name in names for below in named[name].modules()}


def _own_tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Each module's parameters and buffers with their local names; those it shares too."""
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, parameter
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            yield module, name, buffer


def _caster(dtype: torch.dtype, scheme: Scheme) -> Callable[[torch.Tensor], torch.Tensor]:
    in_fp32 = scheme.emulated or (scheme.spec.kind == "layercast" and not scheme.stores_narrow)
    if in_fp32:
        return lambda weight: rounded(weight, dtype, saturate=scheme.saturates)
    return lambda weight: weight.to(dtype)


def _cast_weights(
    module: nn.Module, kept: set[nn.Module], cast: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Replace weights module by module.

    A weight that several cast modules share stays shared. One that a kept and a cast module
    share, as an output layer tied to an embedding, becomes two.
    """
    done: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for owner, name, tensor in list(_own_tensors(module.modules())):
            if owner in kept or not tensor.is_floating_point():
                continue
            if id(tensor) not in done:
                cast_tensor = cast(tensor.detach())
                is_parameter = isinstance(tensor, nn.Parameter)
                done[id(tensor)] = nn.Parameter(cast_tensor, False) if is_parameter else cast_tensor
            # Through setattr, since recurrent layers keep a second list of their weights.
            setattr(owner, name, done[id(tensor)])
