"""Making code of a program: `jit` of a function, and `compile` of what `functron.trace` made.

`segments` divides a program into kernels and steps, `lower` makes an fx graph of a kernel,
`inductor` compiles it and keeps it on disk, `driver` runs the steps; `cut` divides a program into
pieces, as pipelines need them.
"""

from functron.compiler.executable import Executable, compile  # noqa: A004
from functron.compiler.jit import jit

__all__ = ["Executable", "compile", "jit"]
