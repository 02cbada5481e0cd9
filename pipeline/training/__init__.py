"""Training: from a sealed dataset of states to checkpoints of a drafter.

Owns the plan of packs and optimizer steps, the learning-rate schedule, the optimizer with its
float32 masters, the loop, checkpoints, metrics files, and several ranks under torchrun.
Promises that the loss of an optimizer step is normalised over all its packs on all ranks, that a
checkpoint is complete or invisible, that a resumed run on a CPU gives the same losses bit for bit,
and that non-finite numbers stop the run before they touch the weights.
May import draft, store, target, slate, settings, kernels and faults.
"""
