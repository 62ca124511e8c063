"""Pages of the documentation: their programs run, and what they say is what the code says."""
