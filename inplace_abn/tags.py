"""Finds readers that notice the tags of relu, hardswish and gelu, whose zeros are tiny numbers in training.

In place, a relu's zero is a tiny negative number. A zero of hardswish's flat part, or of gelu's tail, is a tiny
positive number. From these numbers backward recovers what was activated. A calculation does not notice the difference.
Comparisons with zero, roots, roundings and ops that order values do. Tags are kept by all ops that make zeros of zeros.

The tag of a silu or mish, its last bit, is no more than a rounding. Batch normalisation that is computed in another
order rounds as well.
"""

from __future__ import annotations

import torch

from inplace_abn.activations import find, is_relu
from inplace_abn.recording import Op, Recording, Seen

_NEGATIVE = frozenset({"eq", "ne", "ge", "lt"})
_POSITIVE = frozenset({"eq", "ne", "gt", "le"})
_COMPARISONS = _NEGATIVE | _POSITIVE

_READERS = {
    "tells zeros from other numbers": (
        "sign sgn signbit heaviside copysign nonzero nonzero_static nonzero_numpy count_nonzero any all is_nonzero "
        "logical_not logical_and logical_or logical_xor bernoulli multinomial poisson binary_cross_entropy to_sparse "
        "_to_sparse to_sparse_csr _to_sparse_csr isclose atan2"
    ),
    "takes a root or logarithm": "sqrt rsqrt log log2 log10 special_entr xlogy special_xlogy special_xlog1py logit",
    "rounds": "floor ceil remainder floor_divide frexp nextafter",
    "orders values": (
        "topk sort argsort msort argmax argmin kthvalue mode unique _unique _unique2 unique_dim unique_consecutive "
        "searchsorted bucketize histc histogram _histogramdd_from_bin_cts _histogramdd_bin_edges"
    ),
    "divides": "reciprocal",
}
_READS = {name: reading for reading, names in _READERS.items() for name in names.split()}

_KEEPERS = {
    "the same values, elsewhere": (
        "cat stack clone copy contiguous _to_copy constant_pad_nd pad reflection_pad1d reflection_pad2d "
        "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d index index_select gather take "
        "take_along_dim masked_select masked_fill masked_scatter where scatter scatter_add index_put index_copy "
        "index_fill slice_scatter select_scatter diagonal_scatter slice_backward flip roll rot90 repeat "
        "repeat_interleave tile tril triu im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle unfold "
        "as_strided_copy fft_fftshift upsample_nearest1d upsample_nearest2d upsample_nearest3d "
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d grid_sampler_2d "
        "_unsafe_index _unsafe_masked_index max_unpool2d max_unpool3d reshape view_copy permute_copy "
        "_reshape_alias"
    ),
    "the largest or smallest of them": (
        "max_pool2d_with_indices max_pool3d_with_indices max_pool1d_with_indices max_pool1d max_pool2d max_pool3d "
        "mkldnn_max_pool2d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max "
        "min amax amin aminmax median nanmedian cummax cummin topk sort kthvalue mode maximum fmax"
    ),
    "zeros of zeros": (
        "mul neg abs square native_dropout dropout mean sum avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
        "adaptive_avg_pool2d _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_linear1d upsample_bilinear2d "
        "_upsample_bilinear2d_aa upsample_bicubic2d upsample_trilinear3d leaky_relu tanh silu gelu sin expm1 log1p "
        "erf cumsum trunc round prod bmm mm"
    ),
}
_KEEPING = frozenset(name for names in _KEEPERS.values() for name in names.split())
_ONLY_TOGETHER = frozenset({"add", "sub", "maximum", "fmax", "mm", "bmm"})
"""Ops that are followed only if all of their operands have tags. Only then sums have zeros, and only then the zeros of
matrix products are worth following."""


def readers(recording: Recording, z: int, op: int, activation: str, param: float) -> list[str]:
    """The readers of ``z``, the storage of the activation's result, that notice a tag.

    Args:
        op: number of the activation's op. Later ops are looked at.
        activation, param: as in `inplace_abn.settings`.

    Returns:
        Reasons in words; empty if there is no reader, or if the activation has no such zeros.
    """
    name = "relu" if is_relu(activation, param) else activation
    sign = find(name).zeros
    if not sign:
        return []
    what = f"its {name}'s zeros are tiny {sign} numbers in training"
    comparisons = _POSITIVE if sign == "positive" else _NEGATIVE
    tagged = {z}
    chosen: dict[int, Op] = {}
    found = []
    for i in range(op + 1, len(recording.ops)):
        reader = recording.ops[i]
        found += [f"{chosen[s]} chooses by them, and {reader} reads its choice" for s in reader.reads & chosen.keys()]
        own = [t for t in reader.tensors if t.storage in tagged]
        if not own:
            continue
        name = reader.name.removesuffix("_")
        reading = _reading(reader, name, own, tagged, comparisons)
        if reading:
            found.append(f"{reader} {reading}")
        keeps = _keeps(reader, name, own, tagged)
        for result in reader.results:
            if not result.dtype.is_floating_point:
                if keeps and name not in _READS and result.storage not in reader.writes:
                    chosen[result.storage] = reader
            elif keeps:
                tagged.add(result.storage)
            elif result.storage in reader.writes and result.whole:
                tagged.discard(result.storage)
    kept = (recording.outputs | recording.alive) & chosen.keys()
    found += [f"{chosen[s]} chooses by them, and its choice is kept or returned" for s in sorted(kept)]
    for watch in recording.watches:
        if watch.storage in tagged and watch.before > op and watch.kind in ("memory", "truth"):
            found.append(f"{watch.what} reads them")
    return [f"{what}, and {reason}" if not reason.count("chooses") else f"{what}: {reason}" for reason in found]


def _reading(op: Op, name: str, own: list[Seen], tagged: set[int], comparisons: frozenset[str]) -> str:
    """How the op distinguishes a tag from a zero, in words; empty if it does not."""
    values = op.values
    if name in _COMPARISONS:
        other = values.get("other")
        if len(op.tensors) > 1:
            return "compares them with other values"
        return "compares them with zero" if other == 0 and name in comparisons else ""
    if name == "pow":
        exponent = values.get("exponent")
        base = op.tensors[0].storage in tagged and "self" not in values
        if not base:
            return ""
        whole = isinstance(exponent, (int, float)) and float(exponent).is_integer() and exponent >= 0
        return "" if whole else "takes a power that is no whole number"
    if name in ("linalg_vector_norm", "norm") and values.get("ord", values.get("p")) == 0:
        return "tells zeros from other numbers"
    if name in ("div", "true_divide"):
        if values.get("rounding_mode") == "floor":
            return "rounds"
        return "divides by them" if any(t.storage in tagged for t in op.tensors[1:]) else ""
    if name == "_to_copy" and any(result.dtype == torch.bool for result in op.results):
        return "tells zeros from other numbers"
    return _READS.get(name, "")


def _keeps(op: Op, name: str, own: list[Seen], tagged: set[int]) -> bool:
    """Whether the result has zeros where the tagged tensors have them."""
    if name in _ONLY_TOGETHER:
        return len(own) == len(op.tensors) and "other" not in op.values
    if name in ("div", "pow"):
        return op.tensors[0].storage in tagged and "self" not in op.values
    if name in ("hardtanh", "clamp", "clamp_min"):
        least = op.values.get("min_val", op.values.get("min"))
        return least is not None and least < 0
    if name == "clamp_max":
        return True
    return name in _KEEPING
