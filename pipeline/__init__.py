"""Cleanslate: from a target model and conversations to an EAGLE-3 drafter, with proof."""
