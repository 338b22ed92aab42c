"""What trains the bundled models: one command each, see research/training/README.md."""
