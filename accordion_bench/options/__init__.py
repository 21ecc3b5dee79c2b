"""Read and refuse options: checks in one sentence, from a config group to an object, where conf/ is."""
