"""Conversations: from any conversation file to token ids and a mask of supervised tokens.

Owns: reading conversation files (read), the one shape of a conversation (normalise), rendering with
the target's own template and proving what the assistant wrote (render, pool), and making
conversations out of public questions and the target's own answers (prompts, answers).

Promises: every record that goes in comes out as a sample or as a skip with a stable reason, so
read = kept + skipped; supervised tokens are exactly what the assistant wrote, its end-of-turn
included, proven by rendering and never found by a pattern; what cannot be proven is refused;
memory stays bounded whatever the size of the file.

May import: capture, draft, store, target, slate, host, settings, faults.
"""
