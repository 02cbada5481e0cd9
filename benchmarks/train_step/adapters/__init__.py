"""One file a trainer: how its own classes are called for one optimizer step.

An adapter gives FORMS, the forms of a case it takes; NOTE, what a reader of its line must know; and
`Trainer(case, material)` with `load(case)`, which prepares the batch of a case of the same group,
and `step()`, one optimizer step, which gives the loss on the device without waiting for it. An
adapter of another trainer only imports and calls that trainer; nothing of it is copied here.
"""
