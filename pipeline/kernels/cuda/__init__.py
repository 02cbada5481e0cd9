"""Triton forms of the kernels, for CUDA tensors.

Owns the Triton kernels, their launchers and their block sizes by device. Each module's launcher
has the name and arguments of the public function that calls it. Promises: no float atomics; what
`ahead` compiles is what is launched; sizes that change from pack to pack compile nothing anew.
Only this room imports triton.

May import: faults.
"""
