"""From gradients to updates, bucket by bucket, during the backward pass or after it."""
