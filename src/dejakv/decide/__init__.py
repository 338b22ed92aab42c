"""Decisions about requests: donors are searched, guards judge them, and plans are chosen."""
