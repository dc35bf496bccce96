"""What a compiled kernel takes, read from its cubin with the tools that Triton carries; needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

COUNTED = ("LDL", "STL", "HGMMA", "UTMALDG")  # loads and stores of spilled registers; wgmma and TMA instructions
SHARED_MEMORY = {80: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes of a block; sm_80 also stands for sm_86


def measure(compiled) -> dict[str, int]:
    """Bytes of shared memory, and how often each of COUNTED occurs."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"), file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"shared": compiled.metadata.shared, **{name: len(re.findall(rf"\b{name}", sass)) for name in COUNTED}}


def too_much(found: dict[str, int], sm: int) -> bool:
    """Whether the kernel spills registers, or does not fit into the shared memory of the architecture."""
    return bool(found["LDL"] or found["STL"] or found["shared"] > SHARED_MEMORY[sm])
