"""What operators do to values: tables by name, and the plan for an operator made from them.

Names are those of ATen's operators as a dispatch mode sees them in inference mode, where
composite operators arrive whole, without the underscore of their in-place variants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch._C import DispatchKey

#: Operators whose FP32 results hold only values that their inputs held already, or small integers.
MOVING = frozenset(
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
MIXING = frozenset(
    """
    _to_copy abs cat clamp clamp_max clamp_min clip column_stack concat concatenate constant_pad_nd
    copy dstack fill fmax fmin full full_like hardtanh hstack index_copy index_fill masked_fill max
    maximum min minimum new_full pad relu6 scalar_tensor select_scatter slice_scatter stack
    threshold to type_as vstack where
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a column
)

#: Composite operators that 16-bit backends compute in one kernel, with one rounding at the end,
#: and dropout, which returns its input in eval mode.
FUSED = frozenset(
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
FIRST_ONLY = frozenset(
    """
    _batch_norm_impl_index _fused_rms_norm _native_batch_norm_legit
    _native_batch_norm_legit_no_training _scaled_dot_product_flash_attention_for_cpu
    native_batch_norm native_group_norm native_layer_norm
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a column
)


_CONVOLUTIONS = """
    _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
    convolution_overrideable mkldnn_convolution
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a column

#: Operators of the matrix unit -> the arguments that are its operands. Biases are not.
CUBE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("linear",), ("input", "weight")),
    **dict.fromkeys(("matmul", "linalg_vecdot", "vdot"), ("self", "other", "x", "y")),
    **dict.fromkeys(("mm", "bmm"), ("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), ("mat1", "mat2")),
    **dict.fromkeys(("baddbmm", "addbmm"), ("batch1", "batch2")),
    **dict.fromkeys(("mv",), ("self", "vec")),
    **dict.fromkeys(("addmv",), ("mat", "vec")),
    **dict.fromkeys(("dot",), ("self", "tensor")),
    **dict.fromkeys(_CONVOLUTIONS, ("input", "weight")),
    **dict.fromkeys(("mkldnn_rnn_layer",), ("input", "weight0", "weight1", "hx_")),
}

#: Computed by a card without FP32 products in FP16 too, by the vector unit.
POOLING: Mapping[str, tuple[str, ...]] = {"avg_pool1d": ("self",), "avg_pool2d": ("self",)}

#: Autocast: run at 16 bits, operands and result.
LOWERED = frozenset(CUBE) | frozenset(
    """
    addr chain_matmul conv_tbc einsum gru_cell linalg_matmul linalg_multi_dot lstm_cell prelu
    rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a column
)

#: Autocast: run at FP32, with FP32 results.
WIDENED = frozenset(
    """
    _log_softmax _softmax acos asin binary_cross_entropy_with_logits cdist cosh
    cosine_embedding_loss cosine_similarity cumprod cumsum dist erfinv exp expm1 frobenius_norm
    group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_norm
    linalg_norm linalg_vector_norm log log10 log1p log2 log_softmax logsumexp margin_ranking_loss
    mse_loss multi_margin_loss multilabel_margin_loss native_group_norm native_layer_norm nll_loss
    nll_loss2d nll_loss_nd norm nuclear_norm pdist poisson_nll_loss pow prod reciprocal renorm
    rms_norm _fused_rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softplus sum tan
    triplet_margin_loss
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a column
)

#: Their results have the first tensor's dtype, whatever the others' is.
FOLLOWING = frozenset(
    """
    _batch_norm_impl_index _native_batch_norm_legit _native_batch_norm_legit_no_training batch_norm
    copy index_add index_copy index_put instance_norm masked_scatter native_batch_norm scatter
    scatter_add scatter_reduce select_scatter slice_scatter
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a column
)


class Rule(Enum):
    """What becomes of an operator's results."""

    MOVE = auto()  # nothing to round
    MIX = auto()  # to round unless every value that entered is representable
    DECOMPOSE = auto()  # made of several kernels: run it operator by operator
    FIRST = auto()  # round the first result
    ALL = auto()  # round every result


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one operator overload, made once."""

    #: Without its namespace; empty if it is not ATen's.
    name: str
    rule: Rule
    #: Made of other operators, which a mode can see one by one.
    composite: bool
    #: Position and name of each argument that the operator writes to.
    written: tuple[tuple[int, str], ...]
    #: Position and name of each operand of the matrix unit, and of average pooling.
    cube: tuple[tuple[int, str], ...]
    pooling: tuple[tuple[int, str], ...]


plans: dict[Any, Plan] = {}


def plan_of(operator: Any) -> Plan:
    """Decide for an operator from its name and schema, and remember it in `plans`."""
    schema = operator._schema  # noqa: SLF001 - torch's only way to an operator's schema
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    namespace, _, name = schema.name.partition("::")
    if written:
        name = name.removesuffix("_")
    if namespace != "aten":
        name = ""
    composite = operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)

    def places(table: Mapping[str, tuple[str, ...]]) -> tuple[tuple[int, str], ...]:
        operands = table.get(name, ())
        return tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.name in operands)

    plan = Plan(name, _rule(name, composite), composite, written, places(CUBE), places(POOLING))
    return plans.setdefault(operator, plan)


def _rule(name: str, composite: bool) -> Rule:
    if not name:
        return Rule.ALL
    for names, rule in (
        (MOVING, Rule.MOVE),
        (MIXING, Rule.MIX),
        (FUSED, Rule.ALL),
        (FIRST_ONLY, Rule.FIRST),
    ):
        if name in names:
            return rule
    return Rule.DECOMPOSE if composite else Rule.ALL


def tensors_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments; they nest one list deep."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (part for part in value if isinstance(part, torch.Tensor))
