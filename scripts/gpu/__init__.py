"""What a machine with a GPU must still show: correctness, launches, times, memory."""
