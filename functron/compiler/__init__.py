"""Making code of a program: `jit` of a function, and `compile` of what `functron.trace` made.

`segments` divides a program into kernels and steps, `lower` makes an fx graph of a kernel,
`inductor` compiles it and keeps it on disk, `executor` runs the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.compiler.executable import Executable, compile  # noqa: A004
    from functron.compiler.jit import jit

import_lazily(__name__)
