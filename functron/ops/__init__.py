"""Operations that models and optimizers are made of, and the choice of what computes them."""

from functron.ops.define import AUTO, Kernels, use

__all__ = ["AUTO", "Kernels", "use"]
