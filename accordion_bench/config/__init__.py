"""From a configuration to components, and what does not fit together."""
