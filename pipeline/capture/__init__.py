"""Capture: the contract between a stage and whatever runs the target, and the proof of each reply.

Owns the request and its receipt, the engines that fulfil the contract (transformers, and a stand-in
for tests), the staging folder with its quota, and the collector that believes nothing unchecked.
May import draft, store, target, slate, host, settings and faults; uses store and target.
"""
