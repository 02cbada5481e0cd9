"""The drafter: model, attention, loss, vocabulary map, export.

Owns the shape of an EAGLE-3 drafter and its training-time-test loss over one packed batch.
Promises: the sparse form gives the loss and gradients of the dense form (tests/draft/reference.py),
written out by hand over one stack of live rows, no tensor of rows x draft vocabulary outlives a
chunk, and an exported folder holds exactly the
names that SGLang and vLLM read. Knows nothing of steps, ranks, files of states or optimizers.

May import: kernels, store, target, slate, host, settings, faults.
"""
