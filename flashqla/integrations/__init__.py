"""Doors into libraries that models already call. Nothing here is imported unless asked for."""
