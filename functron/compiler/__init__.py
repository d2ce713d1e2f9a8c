"""Making code of a program: `jit` of a function, and `compile` of what `functron.trace` made."""

from functron.compiler.executable import Executable, compile  # noqa: A004
from functron.compiler.jit import jit

__all__ = ["Executable", "compile", "jit"]
