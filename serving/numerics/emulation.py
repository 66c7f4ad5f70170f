"""16-bit arithmetic on a device that has none: compute in FP32, round every result.

A card multiplies FP16 and accumulates in FP32, then rounds the result once. On a CPU without
FP16 units the same is had by keeping every tensor in FP32 but on values that the 16-bit dtype
can represent: weights and inputs are rounded beforehand, and a `TorchDispatchMode` rounds the
result of each operator that computes something. torch's own half kernels on such a CPU take
4-13 times as long as FP32.

Known gaps, where the emulation differs from tensors that are truly 16 bits wide:

* ``tensor.dtype`` reads ``torch.float32``. Code that asks ``torch.finfo(x.dtype)`` for a mask's
  fill value or an epsilon gets FP32's, and the fill value then overflows to infinity. Code that
  raises on half tensors doesn't.
* An explicit upcast inside the module (``x.float()``) does nothing, so that what follows is
  still rounded; a module that should compute in FP32 is named in `keep_fp32` instead.
* The inside of a fused operator is FP32: attention (`scaled_dot_product_attention`), a whole
  LSTM layer, softmax, normalisation, convolution with its bias. Their results are rounded.
  This is what fused 16-bit kernels do too, up to the order of summation.
* Python numbers in arithmetic (``x * 0.1``) are not rounded. torch's half kernels take most of
  them at FP32 too, and a few (``x + 0.1`` on a CPU) round them first. Where a number becomes an
  element (fill, clamp, pad, where) it is rounded.
* A kept module that writes to its input writes unrounded values, where a 16-bit tensor's
  FP32 copy would have been written to instead.
* Complex and FP64 tensors are left alone.
* Memory is FP32's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode

from serving.numerics.rounding import overlaps_itself, representable, round_in_place, rounded

#: Operators whose FP32 results hold only values that their inputs held already, or small integers.
_MOVING = frozenset(
    """
    _reshape_alias _unsafe_view adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d alias
    amax amin as_strided broadcast_tensors broadcast_to channel_shuffle chunk clone contiguous
    cummax cummin detach diag diag_embed diagonal embedding empty empty_like empty_strided expand
    expand_as flatten flip fliplr flipud gather index index_select kthvalue lift_fresh masked_select
    max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
    max_pool3d_with_indices median mode moveaxis movedim narrow narrow_copy neg negative new_empty
    new_ones new_zeros numpy_T ones ones_like permute pixel_shuffle pixel_unshuffle positive ravel
    reflection_pad1d reflection_pad2d reflection_pad3d relu repeat repeat_interleave
    replication_pad1d replication_pad2d replication_pad3d reshape reshape_as resolve_conj
    resolve_neg roll rot90 select sign slice sort split split_with_sizes squeeze swapaxes swapdims t
    take take_along_dim tensor_split tile topk transpose tril triu unbind unflatten unfold
    unfold_copy unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze upsample_nearest1d
    upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d view view_as zero zeros zeros_like
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a column
)

#: Moving too, but a number, an integer or a 0-dimensional constant may enter among the values.
_MIXING = frozenset(
    """
    _to_copy abs cat clamp clamp_max clamp_min clip column_stack concat concatenate constant_pad_nd
    copy dstack fill fmax fmin full full_like hardtanh hstack index_copy index_fill masked_fill max
    maximum min minimum new_full pad relu6 scalar_tensor select_scatter slice_scatter stack
    threshold to type_as vstack where
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a column
)

#: Composite operators that 16-bit backends compute in one kernel, with one rounding at the end,
#: and dropout, which returns its input in eval mode.
_FUSED = frozenset(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d alpha_dropout avg_pool1d batch_norm
    bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d dropout
    feature_alpha_dropout feature_dropout group_norm instance_norm layer_norm linear log_softmax
    matmul rms_norm scaled_dot_product_attention softmax _upsample_bicubic2d_aa
    _upsample_bilinear2d_aa _upsample_lanczos2d_aa upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_trilinear3d
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a column
)

#: Only the first result is passed on; the others are statistics that training would use.
_FIRST_ONLY = frozenset(
    """
    _batch_norm_impl_index _fused_rms_norm _native_batch_norm_legit
    _native_batch_norm_legit_no_training _scaled_dot_product_flash_attention_for_cpu
    native_batch_norm native_group_norm native_layer_norm
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a column
)


class _Rule(Enum):
    """What becomes of an operator's results."""

    MOVE = auto()  # nothing to round
    MIX = auto()  # to round unless every value that entered is representable
    DECOMPOSE = auto()  # made of several kernels: run it operator by operator
    FIRST = auto()  # round the first result
    ALL = auto()  # round every result


@dataclass(frozen=True, slots=True)
class _Plan:
    """The decision for one operator overload, made once."""

    rule: _Rule
    #: Position and name of each argument that the operator writes to.
    written: tuple[tuple[int, str], ...]


_plans: dict[Any, _Plan] = {}
_share_memory = torch._C._is_alias_of  # type: ignore[attr-defined]  # noqa: SLF001 - no public name


def _plan(operator: Any) -> _Plan:
    """Decide for an operator from its name and schema, and remember it."""
    schema = operator._schema  # noqa: SLF001 - torch's only way to an operator's schema
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    namespace, _, name = schema.name.partition("::")
    if written:
        name = name.removesuffix("_")
    rule = _rule(operator, name) if namespace == "aten" else _Rule.ALL
    return _plans.setdefault(operator, _Plan(rule, written))


def _rule(operator: Any, name: str) -> _Rule:
    for names, rule in (
        (_MOVING, _Rule.MOVE),
        (_MIXING, _Rule.MIX),
        (_FUSED, _Rule.ALL),
        (_FIRST_ONLY, _Rule.FIRST),
    ):
        if name in names:
            return rule
    if operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        return _Rule.DECOMPOSE
    return _Rule.ALL


class Islands(threading.local):
    """Where a running forward pass is: inside a module kept in FP32, or outside.

    One per converted module; each thread sees its own state.
    """

    def __init__(self) -> None:
        self.inside = False
        #: Results of the output layer, and what was computed from them: FP32, never rounded.
        self.wide: dict[int, torch.Tensor] = {}


class RoundResults(TorchDispatchMode):
    """Rounds the FP32 result of every operator that runs under it.

    Results are rounded where they lie if the operator made them. A result that shares
    memory with an argument is a view, whose values were rounded when they were written; an
    argument that the operator wrote to (``add_``, ``out=``) is rounded after the write.

    Args:
        dtype: `torch.float16` or `torch.bfloat16`.
        islands: rounding pauses while `islands.inside`; tensors in `islands.wide` stay FP32 and
            so does what is computed from them, as type promotion has it.
    """

    def __init__(self, dtype: torch.dtype, islands: Islands) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self.islands = islands

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        islands = self.islands
        if islands.inside:
            return func(*args, **kwargs)
        if islands.wide and any(id(t) in islands.wide for t in _tensors(args, kwargs)):
            result = func(*args, **kwargs)
            islands.wide.update((id(t), t) for t in _tensors((result,), {}))
            return result
        plan = _plans.get(func) or _plan(func)
        if plan.rule is _Rule.DECOMPOSE:
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if plan.rule is _Rule.MOVE or (plan.rule is _Rule.MIX and self._representable(args, kwargs)):
            return result
        for position, name in plan.written:
            self._round_written(args[position] if position < len(args) else kwargs.get(name))
        return self._round_result(plan.rule, result, args, kwargs)

    def _representable(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether all that may enter an operator's result is a value of the dtype already.

        FP32 tensors are, except those without dimensions: a constant such as
        ``torch.tensor(-1e9)``. Numbers inside lists are sizes.
        """
        for value in (*args, *kwargs.values()):
            if isinstance(value, (int, float)) and not representable(value, self.dtype):
                return False
        return all(
            tensor.dtype is torch.bool or (tensor.dtype is torch.float32 and tensor.dim() > 0)
            for tensor in _tensors(args, kwargs)
        )

    def _round_written(self, argument: Any) -> None:
        for tensor in _tensors((argument,), {}):
            if tensor.dtype is torch.float32:
                round_in_place(tensor, self.dtype)

    def _round_result(
        self, rule: _Rule, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if isinstance(result, torch.Tensor):
            return self._round_fresh(result, args, kwargs)
        if not isinstance(result, (tuple, list)) or not result:
            return result
        if rule is _Rule.FIRST:
            return type(result)((self._round_fresh(result[0], args, kwargs), *result[1:]))
        return type(result)(self._round_fresh(part, args, kwargs) for part in result)

    def _round_fresh(self, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not isinstance(result, torch.Tensor) or result.dtype is not torch.float32:
            return result
        if any(_share_memory(result, tensor) for tensor in _tensors(args, kwargs)):
            return result
        if not result.is_contiguous() and overlaps_itself(result):
            return rounded(result, self.dtype)
        round_in_place(result, self.dtype)
        return result


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments; they nest one list deep."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (part for part in value if isinstance(part, torch.Tensor))
