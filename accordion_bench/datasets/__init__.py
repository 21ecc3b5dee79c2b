"""Data sets: image and text files, downloads, batches on the device, and the sharding of samples over workers."""
