"""Storage at an address: what a run keeps there, and what it reads from there."""
