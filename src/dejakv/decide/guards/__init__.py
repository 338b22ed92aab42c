"""May this donor be trusted? One reason to say no per file."""
