"""The `dejakv` command: one file a subcommand, each a thin face of a function of the package."""
