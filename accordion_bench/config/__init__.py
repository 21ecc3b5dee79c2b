"""From a configuration to components: composition by Hydra, validation, resumption, warnings."""
