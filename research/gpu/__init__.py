"""What DejaKV takes on a GPU: measured where there is one, by arithmetic where there is none."""
