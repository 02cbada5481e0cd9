"""The part of capture that runs inside SGLang's own processes, as a general plugin of SGLang.

Owns the hooks, the assembly of requests out of forward batches, and the road of the states from the
GPU to staging files. Promises: a request is either whole on disk with a receipt, or refused with a
reason; the forward path never waits for the device or for a file, only for room in the ring.
Imports nothing but the standard library, numpy, torch and (late, inside functions) sglang, since
SGLang's interpreter has none of the trainer's dependencies.
"""
