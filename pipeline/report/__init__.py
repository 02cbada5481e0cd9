"""Report: one page that shows what a run read, learned and measured.

Owns the page (self-contained HTML, opened without a network) and its pictures (PNG). Promises that
every number comes from the facts it is given, that text out of conversations is shown as text and
can never become markup, and that a count that does not add up is refused rather than drawn. May
import evaluation, training, conversations, capture, draft, store, target, slate, host, settings
and faults.
"""
