"""Small changes to the kernels that the tests on the emulated device must notice: (file, text, replacement)."""

from __future__ import annotations

MUTATIONS: dict[str, tuple[str, str, str]] = {
    # Barriers and shuffles
    "no barrier before a block's warps are merged": ("planes.cuh", "  __syncthreads();\n  if (warp", "  if (warp"),
    "a barrier for the first warp only": (
        "planes.cuh",
        "  __syncthreads();\n  if (warp != 0) return {};",
        "  if (warp != 0) return {};\n  __syncthreads();",
    ),
    "another lane gives the warp's result": (
        "planes.cuh",
        "if (lane == 0) {\n    sums[warp]",
        "if (lane == 1) {\n    sums[warp]",
    ),
    "half a warp is merged": ("planes.cuh", "int lanes = 16;", "int lanes = 8;"),
    "one warp too many is merged": ("planes.cuh", "lane < warps ?", "lane <= warps ?"),
    "half of the warps are merged": ("planes.cuh", "lanes = most_warps / 2", "lanes = most_warps / 4"),
    "two threads store a block's result": (
        "planes.cuh",
        "if (threadIdx.x == 0) leave",
        "if (threadIdx.x < 2) leave",
    ),
    "no barrier before channels are read": ("rows.cuh", "      __syncthreads();\n#pragma", "#pragma"),
    "no barrier in the reduction over rows": (
        "rows.cuh",
        "      __syncthreads();\n      if (y",
        "      if (y",
    ),
    "no barrier before rows' room is used again": (
        "rows.cuh",
        "      __syncthreads();\n    }\n",
        "    }\n",
    ),
    "a barrier that threads past the last row miss": (
        "rows.cuh",
        "      __syncthreads();\n      if (y",
        "      if (y + half >= p.height) continue;\n      __syncthreads();\n      if (y",
    ),
    "no barrier between the steps of the last merge": (
        "reduction.cuh",
        "    __syncthreads();\n    if (lane",
        "    if (lane",
    ),
    "a shuffle in part of the warp": (
        "planes.cuh",
        "lanes = most_warps / 2; lanes > 0; lanes /= 2) totals",
        "lanes = most_warps / 2; lanes > 0; lanes /= 2) if (lane < 16) totals",
    ),
    # Bounds and masks
    "no mask before a plane's first element": ("planes.cuh", "    if (first < 0) mask &= mask << -first;\n", ""),
    "no mask behind a plane's last element": (
        "planes.cuh",
        "    if (left < width) mask &= (Mask(1) << (left < 0 ? 0 : left)) - 1;\n",
        "",
    ),
    "a mask that is too narrow": ("planes.cuh", "(left < 0 ? 0 : left)) - 1", "(left < 0 ? 0 : left - 1)) - 1"),
    "an item past the last one": (
        "planes.cuh",
        "item + u * p.threads < items ?",
        "item + u * p.threads <= items ?",
    ),
    "items are not counted": (
        "planes.cuh",
        "item + u * p.threads < items ? planes.inside(cursor) : 0",
        "planes.inside(cursor)",
    ),
    "a row past the last one": (
        "rows.cuh",
        "row + u * p.height < p.rows.count ?",
        "row + u * p.height <= p.rows.count ?",
    ),
    "columns past the last channel are walked": ("rows.cuh", "inside && row +", "row +"),
    "channels past the last one are looked up": (
        "rows.cuh",
        "i < p.width * width && column_start + i < p.rows.length;",
        "i < p.width * width;",
    ),
    "rows that are not there are merged": ("rows.cuh", "y < half && y + half < p.height)", "y < half)"),
    "channels past the last one are finished": (
        "reduction.cuh",
        "if (lane == 0 && channel < channels)",
        "if (lane == 0)",
    ),
    "one lane too many merges": ("reduction.cuh", "if (lane < half)", "if (lane <= half)"),
    "one channel too many is combined": ("statistics.cu", "if (c < args.channels)", "if (c <= args.channels)"),
    "a masked load reads what is masked": (
        "elements.cuh",
        "if ((mask >> i & 1) != 0) in[k].set(i, from[i]);",
        "in[k].set(i, from[i]);",
    ),
    "a masked store writes what is masked": ("elements.cuh", "if ((mask >> i & 1) != 0) to[i] =", "to[i] ="),
    "missing elements are not zero": ("elements.cuh", "      in[k] = {};\n", ""),
    "an output that is not wanted is written": (
        "elements.cuh",
        "if (k < Op::needed_outputs || io.out[k].data != nullptr) out[k].store",
        "out[k].store",
    ),
    # Strides and indices
    "results of blocks lie the other way round": (
        "planes.cuh",
        "leave(op, c, merged, shares, part, p.channels)",
        "leave(op, part, merged, shares, c, p.parts)",
    ),
    "results of blocks are read the other way round": (
        "reduction.cuh",
        "shares[share * channels + channel]",
        "shares[channel * count + share]",
    ),
    "all lanes merge all parts": ("reduction.cuh", "share += finish_lanes", "share += finish_lanes / 2"),
    "tiles of other blocks are walked, too": (
        "planes.cuh",
        "item < items; item += stride)",
        "item < items; item += static_cast<Index>(p.tile))",
    ),
    "the cursor is not set back for the stores": (
        "planes.cuh",
        "    if constexpr (Op::outputs > 0) cursor = start;\n",
        "",
    ),
    "the cursor stays in its tile": ("planes.cuh", "    cursor.advance(next_tile, slots);\n  }\n", "  }\n"),
    "the part is taken from the wrong size": (
        "planes.cuh",
        "part = unit - c * p.parts",
        "part = unit - c * p.channels",
    ),
    "groups of other blocks are walked, too": ("rows.cuh", "g += p.parts)", "g += 1)"),
    "every second group is left out": ("rows.cuh", "g += p.parts)", "g += 2 * p.parts)"),
    "the neighbour in the reduction is another column": (
        "rows.cuh",
        "threadIdx.x - half * p.width",
        "threadIdx.x - half",
    ),
    "the walk backward starts too late": ("rows.cuh", "p.groups - 1 - g)", "p.groups - g)"),
    "all items of a row are stored in the first": (
        "rows.cuh",
        "store<Op, width>(io, locate(u),",
        "store<Op, width>(io, locate(0),",
    ),
    "vectors of one column overlap": ("rows.cuh", "e = column_start + x * width;", "e = column_start + x;"),
    "too few slots for ragged planes": ("partition.h", "(even ? 0 : width - 1)", "(even ? 0 : width - 2)"),
    "the next tile is one too far": ("partition.h", "split((p.parts - 1) * p.tile", "split(p.parts * p.tile"),
    "a slot past the plane's last": ("partition.h", "if (slots >= slots_of_plane)", "if (slots > slots_of_plane)"),
    "the last group of rows is dropped": (
        "partition.h",
        "p.groups = ceil_div(rows.count, static_cast<int64_t>(p.height) * unroll);",
        "p.groups = std::max<int64_t>(1, rows.count / (static_cast<int64_t>(p.height) * unroll));",
    ),
    "the last column is dropped": (
        "partition.h",
        "p.columns = ceil_div(across, p.width);",
        "p.columns = std::max<int64_t>(1, across / p.width);",
    ),
    "half of an odd number of rows is not reduced": (
        "partition.h",
        "static_cast<int>(std::bit_ceil(static_cast<unsigned>(p.height)) / 2)",
        "p.height / 2",
    ),
    "slots ignore where planes start": (
        "partition.h",
        "((phase + plane_offset) & (width - 1))",
        "(phase & (width - 1))",
    ),
    "slots ignore where memory starts": (
        "partition.h",
        "((phase + plane_offset) & (width - 1))",
        "(plane_offset & (width - 1))",
    ),
    "a block of one thread too many": ("launch.cuh", "kernel<<<grid, threads, 0", "kernel<<<grid, threads + 1, 0"),
    "scratch memory for one channel": (
        "walk.cuh",
        "memory.emplace(shares * extent.channels)",
        "memory.emplace(shares)",
    ),
    # Vectors
    "vectors where tensors disagree": ("planes.cuh", "agree = agree && offsets(view) == first;", ""),
    "planes are taken for even": (
        "planes.cuh",
        "const bool aligned = agree && first == Offsets{0, 0, 0};",
        "const bool aligned = agree;",
    ),
    "vectors whatever the number of channels": (
        "rows.cuh",
        "aligned && fold * length % width == 0 ?",
        "aligned ?",
    ),
    "vectors at multiples of 8 bytes": ("rows.cuh", "% 16 == 0", "% 8 == 0"),
    "vectors whatever the stride of rows": ("rows.cuh", " || fold * view.batch_stride % width == 0)", " || true)"),
    "halves of a word overwrite each other": ("elements.cuh", "~(0xffffu << shift)", "0u"),
    # Order
    "a value is stored before it is merged": (
        "reduction.cuh",
        "      merged.add(shared[threadIdx.x + half * finish_channels]);\n      shared[threadIdx.x] = merged;",
        "      shared[threadIdx.x] = merged;\n      merged.add(shared[threadIdx.x + half * finish_channels]);",
    ),
    "dx is stored before all is loaded": (
        "planes.cuh",
        "      planes.load(cursor, mask[u], in[u]);",
        "      if constexpr (Op::outputs > 0) {\n        Item<scalar_t, width, Op::outputs> zero[1] = {};\n"
        "        if (mask[u] != 0) planes.store(cursor, mask[u], zero[0]);\n      }\n"
        "      planes.load(cursor, mask[u], in[u]);",
    ),
    # 32 bits
    "offsets in 32 bits": (
        "planes.cuh",
        "(at.planes * stride + element)",
        "static_cast<int>(at.planes * stride + element)",
    ),
    "offsets of rows in 32 bits": (
        "rows.cuh",
        "(row + u * p.height) * view.batch_stride + e",
        "static_cast<int>((row + u * p.height) * view.batch_stride + e)",
    ),
    "items in 32 bits": ("planes.cuh", "const int64_t element = first(at)", "const int element = first(at)"),
    "rows in 32 bits": ("rows.cuh", "const int64_t row = (", "const int row = ("),
    "quotients in 32 bits": ("partition.h", "if (((a | b) >> 32) == 0) return", "return"),
    "blocks in 32 bits": (
        "launch.cuh",
        "kernel<<<grid, threads, 0, stream>>>(first,",
        "kernel<<<grid, threads, 0, stream>>>(0,",
    ),
    # Channels that share statistics
    "no barrier before a group's sum": (
        "reduction.cuh",
        "    __syncthreads();\n    if (thread < half)",
        "    if (thread < half)",
    ),
    "threads read a group's sum too early": (
        "reduction.cuh",
        "  __syncthreads();\n  return memory[0];",
        "  return memory[0];",
    ),
    "half of the threads are summed": ("reduction.cuh", "int half = threads / 2;", "int half = threads / 4;"),
    "a channel past the group's last is merged": ("groups.cu", "c < first + shared;", "c <= first + shared;"),
    "the first channels of a group are merged": (
        "groups.cu",
        "c += group_threads) {\n    const double shift",
        "c += args.extent.channels) {\n    const double shift",
    ),
    "the spread of a group's means is left out": ("groups.cu", " + shift * shift}", "}"),
    "means of a group are not weighted": (
        "groups.cu",
        "own.add({gamma * sum_dy, gamma * sum_xhat_dy});",
        "own.add({sum_dy, sum_xhat_dy});",
    ),
    # Norms of rows
    "a column past the row's last is summed or written": (
        "rows_backward.cu",
        "v = lane + kept * team; v < vectors;",
        "v = lane + kept * team; v <= vectors;",
    ),
    "a vector past the row's last is kept": ("rows_backward.cu", "if (lane + k * team < vectors) load", "load"),
    "a vector past the row's last is summed": ("rows_backward.cu", "if (lane + k * team >= vectors) continue;", ""),
    "teams past the last row have one": (
        "rows_backward.cu",
        "row < args.rows ? args.columns / width : 0",
        "args.columns / width",
    ),
    "each row is the first": ("rows_backward.cu", "(first_block + blockIdx.x) * (row_threads / team)", "first_block"),
    "warps of a row do not wait for each other": (
        "rows_backward.cu",
        "of_warps[threadIdx.x / 32] = sums;\n    __syncthreads();",
        "of_warps[threadIdx.x / 32] = sums;",
    ),
    "dx of RMS norms is centred": ("rows_backward.cu", "args.centred ? sums.dy / count : 0", "sums.dy / count"),
    "the sums of a row are not means": ("rows_backward.cu", " = sums.dy_centred / count", " = sums.dy_centred"),
    "a row is not scaled": ("rows_backward.cu", "rstd * (of.g", "(of.g"),
    # What is computed
    "sums are not moved to the channel's pivot": (
        "reduction.cuh",
        "static_cast<double>(sum) + count * shift",
        "static_cast<double>(sum)",
    ),
    "squares are moved as if sums were zero": ("reduction.cuh", "(static_cast<double>(sum) + moved)", "(moved)"),
    "pivots of two threads are taken for equal": (
        "reduction.cuh",
        "    other.move(between, others);\n",
        "",
    ),
    "pivots of a warp are taken for equal": ("planes.cuh", "  sum.share_pivot(count);\n", ""),
    "the mean's shift is left out of the variance": ("reduction.cuh", "count - shift * shift", "count"),
    "the mean is the pivot": ("reduction.cuh", "return {pivot + shift,", "return {pivot,"),
    "means of ranks are taken for equal": ("statistics.cu", " + shift * shift)", ")"),
    "each block's own pivot": (
        "statistics.cuh",
        "return sum.about(static_cast<double>(channel.pivot),",
        "return sum.about(static_cast<double>(sum.pivot),",
    ),
    # Several rows in a vector
    "rows are taken at once that have gaps": ("rows.cuh", "dense ? width /", "true ? width /"),
    "rows left over are left out": ("rows.cuh", "if (rest > 0)", "if (false)"),
    "rows left over start at the first": ("rows.cuh", "rows_from(by_vectors * fold, 1)", "rows_from(0, 1)"),
    "launches share their memory": ("walk.cuh", "if (memory) next += partition.shares() * extent.channels;", ""),
    "repeats overwrite each other": (
        "rows.cuh",
        "part * p.rows.repeats() + p.rows.repeat(element)",
        "part * p.rows.repeats()",
    ),
    "the first of two launches finishes channels": ("walk.cuh", "if (shares > 1) memory", "if (shares > 2) memory"),
    "planes without a gap between them are rows": (
        "walk.cuh",
        "extent.channels == 1 || view.channel_stride == extent.space",
        "true",
    ),
    "planes of another batch stride": ("planes.cuh", "aligned && same_stride &&", "aligned &&"),
    "planes with ragged ends are taken for even": ("planes.cuh", " && extent.space % width == 0", ""),
    # What backward combines
    "inverted once, xhat is combined as y": ("backward.cu", "of_xhat ? from_xhat : from_y", "from_y"),
    "inverted once, beta is taken off twice": ("backward.cu", "of_xhat ? constant : constant", "constant"),
    "the residual's gradient is left out": (
        "backward.cu",
        "        out[1][e] = static_cast<scalar_t>(dy);\n      }\n      out[0][e] = static_cast<scalar_t>(channel",
        "      }\n      out[0][e] = static_cast<scalar_t>(channel",
    ),
    "the residual stays in y": (
        "backward.cu",
        "      if constexpr (with_residual) y -= static_cast<opmath_t>(in[2][e]);\n      const",
        "      const",
    ),
}
