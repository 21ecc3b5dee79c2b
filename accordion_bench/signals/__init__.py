"""What policies see of gradients and exchanges, and who asks them."""
