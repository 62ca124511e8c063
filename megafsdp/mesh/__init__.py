"""Meshes, placements, and what layers declare about their parameters."""
