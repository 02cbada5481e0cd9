"""Adoption: states that another system dumped, matched with samples and proven to be theirs.

Owns the reading of a dump (folders `req_N` of four files by torch.save), the tests that tie a
request to its sample, and the journal of what was decided. Promises that the dump is only read,
that nothing in it is executed, and that no request is matched by its number or length alone.
May import store, target, slate, settings and faults.
"""
