"""What a compiled kernel takes, read from its cubin with the tools that Triton carries; needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

COUNTED = ("LDL", "STL", "HGMMA", "UTMALDG")  # loads and stores of spilled registers; wgmma and TMA instructions
SHARED_MEMORY = {80: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes of a block; sm_80 also stands for sm_86


def measure(compiled) -> dict[str, int]:
    """Bytes of shared memory, how often each of COUNTED occurs, and spills `in_loops` (see `_spills_in_loops`)."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"), file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {name: len(re.findall(rf"\b{name}", sass)) for name in COUNTED}
    return {"shared": compiled.metadata.shared, **counts, "in_loops": _spills_in_loops(sass.splitlines())}


def _spills_in_loops(lines: list[str]) -> int:
    """LDL and STL in the innermost of the loops that multiply, load or store: what lies outside costs next to nothing.

    A loop goes from a label to a branch back to it. Those in which the registers of a role are set do not count:
    Triton's specialised warps wait for their role in one.
    """
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.startswith(".L")}
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"\bBRA.*`\((\.L\w+)\)", line)
        body = "\n".join(lines[labels.get(target[1], end) : end]) if target else ""
        if "USETMAXREG" not in body and re.search(r"\b(HGMMA|UTMALDG|STG)", body):
            loops.append(body)
    innermost = [body for body in loops if not any(other in body and other != body for other in loops)]
    return sum(len(re.findall(r"\b(?:LDL|STL)", body)) for body in innermost)


def too_much(found: dict[str, int], sm: int) -> bool:
    """Whether the kernel spills registers, or does not fit into the shared memory of the architecture."""
    return bool(found["LDL"] or found["STL"] or found["shared"] > SHARED_MEMORY[sm])
