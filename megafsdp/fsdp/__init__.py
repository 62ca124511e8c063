"""Units: what is gathered, computed, reduced, and when."""
