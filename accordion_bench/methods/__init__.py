"""From options to the methods of a training, which fit together: compressor, policies, synchronisation scheme."""
