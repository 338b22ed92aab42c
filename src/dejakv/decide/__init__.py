"""Decisions: levels find donors, guards judge them, plans use them. One finder serves every engine and server."""
