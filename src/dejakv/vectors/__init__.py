"""Encoders of texts and pictures, embedding hooks, and nearest neighbours over unit vectors."""
