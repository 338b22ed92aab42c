"""May this donor be trusted? The words of a question have a file of their own."""
