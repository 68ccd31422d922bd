"""Scripted controllers that solve known tasks, for demonstrations without downloads."""
