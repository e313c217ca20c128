"""Follows the tags of relu, hardswish and gelu, whose zeros are tiny numbers in training, and finds who notices them.

In place, a relu's zero is a tiny negative number. A zero of hardswish's flat part, or of gelu's tail, is a tiny
positive number. From these numbers backward recovers what was activated. A calculation does not notice the difference.
Comparisons with zero, roots, roundings, divisions and ops that order values do. Tags are kept by all ops but those that
are known to make no zeros of zeros.

The tag of a silu or mish, its last bit, is no more than a rounding. Batch normalisation that is computed in another
order rounds as well.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inplace_abn import _torch
from inplace_abn.activations import in_effect
from inplace_abn.trial import tensors_in

_NEGATIVE = frozenset({"eq", "ne", "ge", "lt"})
_POSITIVE = frozenset({"eq", "ne", "gt", "le"})
_COMPARISONS = _NEGATIVE | _POSITIVE
_BY_SIGN = {"negative": _NEGATIVE, "positive": _POSITIVE, "either": _COMPARISONS}
_ALIASES = {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne"}
_NEXT = "next to zero"
"""The sign of a tag to which next to nothing was added. Only who divides by it notices what it is."""
_DIVIDING = frozenset({"div", "true_divide", "reciprocal", "addcdiv"})

_READERS = {
    "tells zeros from other numbers": (
        "sign sgn signbit angle heaviside copysign nonzero nonzero_static nonzero_numpy argwhere count_nonzero any all "
        "is_nonzero logical_not logical_and logical_or logical_xor equal threshold bernoulli multinomial poisson "
        "binary_cross_entropy to_sparse _to_sparse to_sparse_csr _to_sparse_csr to_sparse_csc _to_sparse_csc "
        "to_sparse_bsr _to_sparse_bsr to_sparse_bsc _to_sparse_bsc isclose isin atan2"
    ),
    "takes a root or logarithm": (
        "sqrt rsqrt log log2 log10 special_entr xlogy special_xlogy special_xlog1py logit special_logit "
        "lgamma digamma polygamma igamma igammac"
    ),
    "rounds": "floor ceil remainder floor_divide frexp nextafter",
    "orders values": (
        "topk sort argsort msort argmax argmin kthvalue mode unique _unique _unique2 unique_dim unique_consecutive "
        "searchsorted bucketize histc histogram histogramdd _histogramdd_from_bin_cts _histogramdd_bin_edges"
    ),
    "divides": "reciprocal addcdiv",
    "reads a zero, as .item() and if do": "_local_scalar_dense",
}
_READS = {name: reading for reading, names in _READERS.items() for name in names.split()}

_LOSERS = {
    "sums with a bias, or over what is not zero": (
        "convolution _convolution convolution_overrideable mkldnn_convolution cudnn_convolution linear mkldnn_linear "
        "addmm addmv addbmm baddbmm addr bilinear native_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training cudnn_batch_norm "
        "_batch_norm_with_update _batch_norm_with_update_functional native_layer_norm native_group_norm "
        "_fused_rms_norm _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable _cdist_forward _euclidean_dist _fft_r2c _fft_c2c _fft_c2r"
    ),
    "not zero where its argument is": (
        "sigmoid exp exp2 cos cosh acos erfc softplus hardsigmoid log_sigmoid_forward _softmax _log_softmax logsumexp "
        "logaddexp logaddexp2 logcumsumexp special_ndtr sinc special_i0 special_i0e special_i1e special_erfcx"
    ),
    "made of no value": (
        "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided "
        "new_zeros new_ones new_full zero fill normal uniform exponential bernoulli"
    ),
    "the same of a tag as of a zero": "isnan isinf isfinite isposinf isneginf eq ne gt ge lt le",
}
_LOSING = frozenset(name for names in _LOSERS.values() for name in names.split())
"""Ops whose results are no zeros where arguments are, or none that are worth following. All others keep tags."""
_SUMS = frozenset({"add", "sub", "rsub"})
_TOGETHER = "maximum fmax mm bmm mv dot vdot lerp addcmul hypot"
_ONLY_TOGETHER = _SUMS.union(_TOGETHER.split())
"""Ops that are followed only if all of their operands have tags. Only then sums have zeros, and only then the zeros of
matrix products are worth following."""
_SIGN_KEEPERS = (
    "cat stack clone copy contiguous _to_copy constant_pad_nd pad reflection_pad1d reflection_pad2d "
    "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d index index_select gather take "
    "take_along_dim masked_select masked_fill masked_scatter where scatter scatter_add index_put index_copy "
    "index_fill slice_scatter select_scatter diagonal_scatter slice_backward flip roll rot90 repeat "
    "repeat_interleave tile tril triu im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle unfold "
    "as_strided_copy fft_fftshift upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d grid_sampler_2d "
    "_unsafe_index _unsafe_masked_index max_unpool2d max_unpool3d reshape view_copy permute_copy _reshape_alias "
    "max_pool2d_with_indices max_pool3d_with_indices max_pool1d_with_indices max_pool1d max_pool2d max_pool3d "
    "mkldnn_max_pool2d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max "
    "min amax amin aminmax median nanmedian cummax cummin topk sort kthvalue mode maximum fmax minimum fmin add "
    "native_dropout dropout mean sum nansum cumsum avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_linear1d upsample_bilinear2d "
    "_upsample_bilinear2d_aa upsample_trilinear3d leaky_relu hardtanh clamp clamp_max clamp_min tanh silu sin "
    "expm1 log1p erf trunc round nan_to_num relu convert_element_type _low_memory_max_pool_with_offsets"
)
_SAME_SIGN = frozenset(_SIGN_KEEPERS.split())
"""Ops whose results have tags of the same sign. Those of all others may have either."""
_CUTTING = {"hardtanh": "min_val", "clamp": "min", "clamp_min": "min"}
"""Ops that make a number of all that is smaller, and their argument of that number. relu makes 0."""


def _is_nothing(value: Any, dtype: torch.dtype) -> bool:
    """Whether a number is so small that a tag, divided by it, would be seen."""
    largest = _LARGEST_NOTHING.get(dtype, 2.0**-24)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= largest


_LARGEST_NOTHING = {torch.float16: 2.0**-10, torch.float64: 0.0}
"""The largest such numbers; 2**-24 in float32 and bfloat16. A tag is 2**-48 of y there, 2**-15 in float16, 2**-300 in
float64."""


class TensorInfo(NamedTuple):
    """What is known of a tensor, without holding the tensor."""

    storage: int
    dtype: torch.dtype
    whole: bool
    """Whether the tensor covers its whole storage."""


class Op(NamedTuple):
    """A call of an op below autograd."""

    name: str
    """The op's name, without namespace, overload, the underscore of ops in place, and the prefix of ops on lists."""
    tensors: tuple[TensorInfo, ...]
    values: dict[str, Any]
    """Arguments that are no tensors, by name, with defaults."""
    writes: frozenset[int]


def storage_of(t: Tensor) -> int:
    return _torch.storage_key(t.untyped_storage())


def info_of(t: Tensor) -> TensorInfo:
    return TensorInfo(storage_of(t), t.dtype, t.numel() * t.element_size() == t.untyped_storage().nbytes())


def op_of(function: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
    """A call of ``function`` with tensors, or with what stands for them in ``args``."""
    schema = _torch.schema_of(function)
    tensors: list[TensorInfo] = []
    values: dict[str, Any] = {}
    writes: set[int] = set()
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        given = list(tensors_in(value))
        # Sparse tensors have no storage, and no tags.
        found = [info_of(t) for t in given if t.layout is torch.strided]
        tensors += found
        if not given:
            values[argument.name] = value
        elif argument.alias_info is not None and argument.alias_info.is_write:
            writes.update(t.storage for t in found)
    return Op(
        schema.name.split("::")[-1].removeprefix("_foreach_").removesuffix("_"),
        tuple(tensors),
        values,
        frozenset(writes),
    )


def is_alias(t: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one storage."""
    return t.layout is torch.strided and storage_of(t) == storage_of(other)


@_torch.read_while_tracing
def name_of(func: Any) -> str:
    """The name of the op that a function of torch's calls, without underscores."""
    name = getattr(func, "__name__", "").split(".")[0].strip("_")
    return _ALIASES.get(name, name)


def is_told(name: str, sign: str, is_first: bool, others: tuple[Any, ...]) -> bool:
    """Whether an op, with these arguments beside a tagged tensor, may tell tags of this sign from zeros.

    Args:
        is_first: whether the tagged tensor is the first argument.
    """
    if name.endswith(("pow", "power")):
        return not is_first or name[0] == "r" or any(not isinstance(v, int) or v < 0 for v in others)
    if name.endswith("div") or name in ("divide", "true_divide", "truediv"):
        return not is_first or name[0] == "r" or name == "floordiv" or "floor" in others
    if name.endswith("norm"):
        return any(type(v) in (int, float) and v == 0 for v in others)
    if name in ("to", "type", "type_as", "view"):
        kinds = [v.dtype if isinstance(v, Tensor) else v for v in others]
        return any(v in _BOOL or (name == "view" and isinstance(v, torch.dtype)) for v in kinds)
    if name == "where":
        return is_first and not others
    return name in ("bool", "float") or name in _READS or name in _BY_SIGN[sign]


_BOOL = (torch.bool, torch.BoolTensor, "torch.BoolTensor")


def sign_of(activation: str, param: float) -> str:
    """The sign of the tiny numbers that stand for zeros: "negative", "positive", or empty if there are none."""
    return in_effect(activation, param).zeros


class Follower:
    """Follows tags from op to op. A source is a layer that tags its output."""

    def __init__(self) -> None:
        self.tagged: dict[int, dict[Hashable, str]] = {}
        """The sources of each storage's tags, and the sign of their tiny numbers: "negative", "positive", "either", or
        `_NEXT`."""
        self.chosen: dict[int, tuple[Op, Collection[Hashable]]] = {}
        """The storages of what ops have chosen by tagged values, such as the indices of a pooling."""

    def add(self, storage: int, source: Hashable, sign: str) -> None:
        self.tagged.setdefault(storage, {})[source] = sign

    def readings(self, op: Op) -> dict[Hashable, str]:
        """The sources whose tags the op notices, and how, in words."""
        found: dict[Hashable, str] = {}
        for t in op.tensors:
            by, sources = self.chosen.get(t.storage, (None, ()))
            if by is not None:
                found |= dict.fromkeys(sources, f"{by.name} chooses by them, and {op.name} reads its choice")
        for t in op.tensors:
            for source, sign in self.tagged.get(t.storage, {}).items():
                is_seen = sign != _NEXT or op.name in _DIVIDING
                reading = self._reading(op, _BY_SIGN.get(sign, ())) if is_seen else ""
                if reading:
                    found[source] = f"{op.name} {reading}"
        return found

    def kept(self, op: Op) -> dict[Hashable, str]:
        """The sources of tags that are tags of the result, too, with their signs: the result has zeros, or numbers next
        to zero, where the tagged tensors have zeros."""
        name, values = op.name, op.values
        own = [t for t in op.tensors if t.storage in self.tagged]
        if not own or name in _LOSING:
            return {}
        if name in _ONLY_TOGETHER and len(own) < len(op.tensors):
            return {}
        if name in _SUMS and "other" in values and not _is_nothing(values["other"], own[0].dtype):
            return {}
        if name in ("div", "pow") and ("self" in values or op.tensors[0].storage not in self.tagged):
            return {}
        sources = {s: sign for t in own for s, sign in self.tagged[t.storage].items()}
        least = 0 if name == "relu" else values.get(_CUTTING.get(name, ""))
        if least == 0:
            sources = {s: sign for s, sign in sources.items() if sign != "negative"}
        elif least is not None and least > 0 and not _is_nothing(least, own[0].dtype):
            return {}
        if (name in _SUMS and values.get("other")) or (least is not None and least > 0):
            return dict.fromkeys(sources, _NEXT)
        return {s: sign if name in _SAME_SIGN or sign == _NEXT else "either" for s, sign in sources.items()}

    def follow(self, op: Op, results: Collection[TensorInfo]) -> None:
        """Notes which results of the op have tags, or were chosen by them."""
        kept = self.kept(op)
        for result in results:
            if not (result.dtype.is_floating_point or result.dtype.is_complex):
                if kept and op.name not in _READS and result.storage not in op.writes:
                    self.chosen[result.storage] = op, kept
            elif kept:
                self.tagged[result.storage] = {**self.tagged.get(result.storage, {}), **kept}
            elif result.storage in op.writes and result.whole:
                self.tagged.pop(result.storage, None)

    def _reading(self, op: Op, comparisons: Collection[str]) -> str:
        """How the op distinguishes a tag from a zero, in words; empty if it does not."""
        name, values = op.name, op.values
        first_is_tagged = op.tensors[0].storage in self.tagged and "self" not in values
        if name in _COMPARISONS:
            if len(op.tensors) > 1:
                return "compares them with other values"
            return "compares them with zero" if values.get("other") == 0 and name in comparisons else ""
        if name == "pow":
            exponent = values.get("exponent")
            whole = isinstance(exponent, (int, float)) and float(exponent).is_integer() and exponent >= 0
            return "takes a power that is no whole number" if first_is_tagged and not whole else ""
        if name in ("linalg_vector_norm", "norm", "dist") and values.get("ord", values.get("p")) == 0:
            return "tells zeros from other numbers"
        if name in ("div", "true_divide"):
            if values.get("rounding_mode") == "floor":
                return "rounds"
            return "divides by them" if any(t.storage in self.tagged for t in op.tensors[1:]) else ""
        if name == "view" and "dtype" in values:
            return "reads their bits"
        if name == "_to_copy" and values.get("dtype") == torch.bool:
            return "tells zeros from other numbers"
        return _READS.get(name, "")
