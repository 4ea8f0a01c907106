"""Batches of named tensors: `DictTensor`, `TemporalDictTensor`, `Trajectories`."""
