"""Translates the parts of CUDA's syntax that are not C++, so that no header can define them.

These are ``kernel<<<grid, block, shared, stream>>>(...)``, ``__shared__`` variables, the head of a ``__global__``
function, which has its name and bounds, and inline PTX. Line numbers stay as they are. Everything else is left to the
compiler.
"""

from __future__ import annotations

import re


def _closing(text: str, opening: int) -> int:
    """The index of the bracket that closes the one at ``opening``."""
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"a bracket is never closed: {text[opening : opening + 60]!r}")


def _launches(text: str) -> str:
    launch = re.compile(r"(\w+)<<<(.*?)>>>\(", re.DOTALL)
    return launch.sub(lambda m: f"::emulation::launch({m[1]}, {m[2]}, ", text)


def _shared_variables(text: str) -> str:
    variable = re.compile(r"__shared__\s+([^;=]+?)\s*\b(\w+)((?:\s*\[[^;]*\])?);")
    return variable.sub(lambda m: f"auto& {m[2]} = ::emulation::shared<{m[1]}{m[3]}>([] {{}});", text)


def _kernel_heads(text: str) -> str:
    parts, at = [], 0
    while (start := text.find("__global__", at)) >= 0:
        bounds, i = "", start + len("__global__")
        while text[i] != "{":
            if text[i] != "(":
                i += 1
                continue
            end = _closing(text, i)
            if text[:i].rstrip().endswith("__launch_bounds__"):
                bounds = text[i + 1 : end]
            i = end + 1
        arguments = ", ".join(["__PRETTY_FUNCTION__", *([bounds] if bounds else [])])
        parts.append(text[at : i + 1] + f" ::emulation::enter_kernel({arguments});")
        at = i + 1
    return "".join(parts) + text[at:]


def _instructions(text: str) -> str:
    instruction = re.compile(r"\basm\s+volatile\s*\(")
    while (found := instruction.search(text)) is not None:
        end = _closing(text, found.end() - 1)
        ptx, outputs, inputs, *_ = (part.strip() for part in re.split(r"(?<!:):(?!:)", text[found.end() : end]))
        if outputs:
            raise ValueError(f"PTX with outputs is not translated: {ptx}")
        operands = re.sub(r'"[a-z]"\s*(?=\()', "", inputs)
        lines = "\n" * (text.count("\n", found.start(), end) - operands.count("\n") - ptx.count("\n"))
        text = text[: found.start()] + f"::emulation::ptx({ptx}, {operands}){lines}" + text[end + 1 :]
    return text


def translate(text: str) -> str:
    for step in (_launches, _shared_variables, _kernel_heads, _instructions):
        text = step(text)
    return text
