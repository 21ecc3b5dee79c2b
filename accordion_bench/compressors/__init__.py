"""Compressors: encode the gradients of each worker, exchange the messages, and decode the mean."""
