"""Small changes to the kernels that the tests on the emulated device must notice: (file, what is there, what is put in
its place)."""

from __future__ import annotations

MUTATIONS: dict[str, tuple[str, str, str]] = {
    # Barriers and shuffles
    "no barrier before a block's warps are merged": ("planes.cuh", "  __syncthreads();\n  if (warp", "  if (warp"),
    "a barrier for the first warp only": (
        "planes.cuh",
        "  __syncthreads();\n  if (warp != 0) return partial;",
        "  if (warp != 0) return partial;\n  __syncthreads();",
    ),
    "another lane gives the warp's result": (
        "planes.cuh",
        "if (lane == 0) shared[warp]",
        "if (lane == 1) shared[warp]",
    ),
    "half a warp is merged": ("planes.cuh", "int lanes = 16;", "int lanes = 8;"),
    "one warp too many is merged": ("planes.cuh", "lane < warps ?", "lane <= warps ?"),
    "half of the warps are merged": ("planes.cuh", "lanes = most_warps / 2", "lanes = most_warps / 4"),
    "two threads store a block's result": (
        "planes.cuh",
        "if (threadIdx.x == 0) partials",
        "if (threadIdx.x < 2) partials",
    ),
    "no barrier before channels are read": ("rows.cuh", "  __syncthreads();\n  typename Op", "  typename Op"),
    "no barrier in the reduction over rows": (
        "rows.cuh",
        "      __syncthreads();\n      const int other",
        "      const int other",
    ),
    "a barrier that threads past the last row miss": (
        "rows.cuh",
        "      __syncthreads();\n      const int other",
        "      if (y + half >= p.height) continue;\n      __syncthreads();\n      const int other",
    ),
    "no barrier between the steps of the last merge": (
        "moments.cuh",
        "    __syncthreads();\n    if (lane",
        "    if (lane",
    ),
    "a shuffle in part of the warp": (
        "planes.cuh",
        "lanes = most_warps / 2; lanes > 0; lanes /= 2) partial",
        "lanes = most_warps / 2; lanes > 0; lanes /= 2) if (lane < 16) partial",
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
        "item + u * p.threads < p.items ?",
        "item + u * p.threads <= p.items ?",
    ),
    "items are not counted": (
        "planes.cuh",
        "item + u * p.threads < p.items ? elements_inside<width>(first, p.space) : 0",
        "elements_inside<width>(first, p.space)",
    ),
    "a row past the last one": ("rows.cuh", "row + u * p.height < p.rows ?", "row + u * p.height <= p.rows ?"),
    "columns past the last channel are walked": ("rows.cuh", "g < p.groups && c < p.channels;", "g < p.groups;"),
    "columns past the last channel are stored": ("rows.cuh", "if (y == 0 && c < p.channels)", "if (y == 0)"),
    "channels past the last one are looked up": (
        "rows.cuh",
        "i < p.width * width && column_start + i < p.channels;",
        "i < p.width * width;",
    ),
    "rows that are not there are merged": ("rows.cuh", "y >= half || y + half >= p.height ||", "y >= half ||"),
    "channels past the last one are finished": (
        "moments.cuh",
        "if (lane == 0 && channel < channels)",
        "if (lane == 0)",
    ),
    "one lane too many merges": ("moments.cuh", "if (lane < half)", "if (lane <= half)"),
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
    "the last group of channels is as long as the others": (
        "walk.cuh",
        "std::min(step, extent.channels - first)",
        "step",
    ),
    # Strides and indices
    "results of blocks lie the other way round": (
        "planes.cuh",
        "partials[part * p.channels + c]",
        "partials[c * p.parts + part]",
    ),
    "results of blocks are read the other way round": (
        "moments.cuh",
        "partials[part * channels + channel]",
        "partials[channel * parts + part]",
    ),
    "all lanes merge all parts": ("moments.cuh", "part += finish_lanes", "part += finish_lanes / 2"),
    "tiles of other blocks are walked, too": (
        "planes.cuh",
        "item < p.items; item += p.parts * p.tile)",
        "item < p.items; item += p.tile)",
    ),
    "the cursor is not set back for the stores": ("planes.cuh", "    cursor = start;\n", ""),
    "the cursor stays in its tile": ("planes.cuh", "    cursor.advance(p.next_tile, p.slots);\n  }\n", "  }\n"),
    "the part is taken from the wrong size": (
        "planes.cuh",
        "part = unit - c * p.parts",
        "part = unit - c * p.channels",
    ),
    "groups of other blocks are walked, too": ("rows.cuh", "g += p.parts)", "g += 1)"),
    "every second group is left out": ("rows.cuh", "g += p.parts)", "g += 2 * p.parts)"),
    "the neighbour in the reduction is another column": (
        "rows.cuh",
        "threadIdx.x + half * p.width",
        "threadIdx.x + half",
    ),
    "the walk backward starts too late": ("rows.cuh", "p.groups - 1 - g)", "p.groups - g)"),
    "all items of a row are stored in the first": (
        "rows.cuh",
        "store<Op, width>(io, row + u * p.height,",
        "store<Op, width>(io, row,",
    ),
    "vectors of one column overlap": ("rows.cuh", "c = column_start + x * width;", "c = column_start + x;"),
    "channels of a slice have no stride": ("walk.cuh", "view.data + c * view.channel_stride", "view.data + c"),
    "too few slots for ragged planes": ("partition.h", "(even ? 0 : width - 1)", "(even ? 0 : width - 2)"),
    "the next tile is one too far": ("partition.h", "make_step((p.parts - 1) * p.tile", "make_step(p.parts * p.tile"),
    "a slot past the plane's last": ("partition.h", "if (slot >= slots)", "if (slot > slots)"),
    "the last group of rows is dropped": (
        "partition.h",
        "p.groups = ceil_div(p.rows, static_cast<int64_t>(p.height) * unroll);",
        "p.groups = std::max<int64_t>(1, p.rows / (static_cast<int64_t>(p.height) * unroll));",
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
        "partials(partition.parts * extent.channels)",
        "partials(partition.parts)",
    ),
    # Vectors
    "vectors where tensors disagree": ("planes.cuh", "agree = agree && offsets(view) == first;", ""),
    "planes are taken for even": (
        "planes.cuh",
        "const bool even = first == Offsets{0, 0, 0};",
        "const bool even = true;",
    ),
    "vectors whatever the number of channels": (
        "rows.cuh",
        "extent.channels % width == 0;",
        "extent.channels >= width;",
    ),
    "vectors at multiples of 8 bytes": ("rows.cuh", "% 16 == 0", "% 8 == 0"),
    "vectors whatever the stride of rows": ("rows.cuh", " || view.batch_stride % width == 0)", " || true)"),
    "halves of a word overwrite each other": ("elements.cuh", "~(0xffffu << shift)", "0u"),
    # Order
    "a value is stored before it is merged": (
        "moments.cuh",
        "      merged.merge(shared[threadIdx.x + half * finish_channels]);\n      shared[threadIdx.x] = merged;",
        "      shared[threadIdx.x] = merged;\n      merged.merge(shared[threadIdx.x + half * finish_channels]);",
    ),
    "dx is stored before all is loaded": (
        "planes.cuh",
        "      load<Op, width>(io, cursor.plane, c, first, mask[u], in[u]);",
        "      if constexpr (Op::outputs > 0) {\n        Item<scalar_t, width, Op::outputs> zero[1] = {};\n"
        "        store<Op, width>(io, cursor.plane, c, first, mask[u], zero[0]);\n      }\n"
        "      load<Op, width>(io, cursor.plane, c, first, mask[u], in[u]);",
    ),
    "means are written for the first channels only": (
        "forward.cu",
        "auto *mean = args.mean + c,",
        "auto *mean = args.mean,",
    ),
    # 32 bits
    "offsets in 32 bits": (
        "elements.cuh",
        "view.data + batch * view.batch_stride + channel * view.channel_stride + element",
        "view.data + static_cast<int>(batch * view.batch_stride + channel * view.channel_stride + element)",
    ),
    "items in 32 bits": ("planes.cuh", "int64_t item = part * p.tile", "int item = part * p.tile"),
    "rows in 32 bits": ("rows.cuh", "const int64_t row = (", "const int row = ("),
    "quotients in 32 bits": ("partition.h", "if (((a | b) >> 32) == 0) return", "return"),
    "slots in 32 bits": (
        "partition.h",
        "struct Cursor {\n  int64_t plane, slot;",
        "struct Cursor {\n  int plane, slot;",
    ),
    "blocks in 32 bits": (
        "launch.cuh",
        "kernel<<<grid, threads, 0, stream>>>(first,",
        "kernel<<<grid, threads, 0, stream>>>(0,",
    ),
    # What is computed
    "the share of a merge is too large": ("moments.cuh", "share = added / (count + added)", "share = added / count"),
    "the mean's shift is left out of the variance": ("moments.cuh", "square - sum * mean", "square"),
    "means of parts are taken for equal": (
        "moments.cuh",
        "m2 += other.m2 + delta * delta * shares.cross",
        "m2 += other.m2",
    ),
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
