"""Evaluation: acceptance measured by real speculative decoding with the real target.

Owns the plain and the drafted greedy loop, the served form of the drafter (key-value cache, chain
of drafts, true taps after each verification) and the counting of what was accepted. Promises that
the served recursion equals the one that was trained, that a drafted answer that differs from the
plain one is named with its first differing position and the logit gaps there, and that every ratio
states what it counts. May import training, conversations, capture, draft, store, target, slate,
host, settings and faults.
"""
