"""What other rewards and algorithms would have made of the rollouts that a run kept; no model is run."""
