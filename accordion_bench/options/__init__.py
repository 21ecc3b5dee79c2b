"""Options of components: declaration, checks with one-sentence errors, YAML files in conf/, and instantiation."""
