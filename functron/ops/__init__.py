"""Operations that models and optimizers are made of, and the choice of what computes them."""

from functron.ops.kernels import AUTO, Kernels, use

__all__ = ["AUTO", "Kernels", "use"]
