"""What trains the bundled models: one command each, see training/README.md."""
