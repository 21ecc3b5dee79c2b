"""Inner optimizers: AdamW, Lion, Muon, SGD variants, and the optimizers of all workers' replicas."""
