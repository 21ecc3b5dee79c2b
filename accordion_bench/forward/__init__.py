"""The forward pass and the loss, and how they are computed."""
