"""Making code of a program: `jit`, segments, schedules of kernels, Inductor."""
