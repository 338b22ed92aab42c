"""Ways to find a donor, one a file, in the order of cost."""
