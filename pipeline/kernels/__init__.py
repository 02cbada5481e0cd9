"""Kernels: what the training step does beside matrix products.

Owns norms, rotations, the gated unit, the loss by row, attention over step-0 and own keys, and the
AdamW update, forward and backward. Each function has a plain torch form (any float dtype, exact in
float64, the one that runs on a CPU) and a Triton form for CUDA tensors, in `kernels/cuda`.
Promises: outputs go where the caller says and no function allocates more than it documents; the
same input gives the same bits; both forms agree to the rounding of the dtype. "Wide" is float32,
or the dtype when that is wider. Triton is imported only where a CUDA tensor is met.

May import: faults.
"""
