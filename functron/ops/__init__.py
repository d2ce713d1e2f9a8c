"""Operations of models and optimizers, and the choice of what computes them.

`register` registers an operation of one's own, by a reference alone or with a kernel; `define` is
what functron's are made by, with shapes, vmap rule, gradient and CUDA kernel written down. `use`
makes the `Kernels` that choose reference or kernel for each op. The modules are `attention`,
`softmax`, `norms`, `glu`, `qk_norm_rope`, `cross_entropy`, `moe`, `grouped_matmul`, `quantise`,
`scaled_matmul`, `adamw` and `foreach`; `nvrtc` compiles the files of ``kernels/`` and `launch` runs
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from functron.core import import_lazily

if TYPE_CHECKING:
    from functron.ops.operations import AUTO, Gradient, Kernels, Op, define, use
    from functron.ops.registration import CudaKernel, register

import_lazily(__name__)
