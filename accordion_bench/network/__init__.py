"""Links: modelled from bytes and rounds, and measured at the interface."""
