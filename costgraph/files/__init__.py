"""Graphs as files: written, read, and held to what an op may say."""
