"""Build compressor, policies and synchronisation scheme from options, and check that they are compatible."""
