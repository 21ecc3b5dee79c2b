"""Forward pass and loss: tasks, precision, torch.compile, and trial steps before a run."""
