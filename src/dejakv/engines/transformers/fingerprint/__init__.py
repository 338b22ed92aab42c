"""What counts as the same model: its content, its code, its weights, and the watch over them."""
