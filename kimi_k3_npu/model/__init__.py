"""The network, engine-neutral: one block of the model a file, over flat ragged batches of tokens [T, H]."""
