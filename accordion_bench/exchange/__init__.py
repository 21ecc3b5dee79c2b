"""Exchange the gradients of workers in buckets, during the backward pass or after it."""
