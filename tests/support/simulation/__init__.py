"""The real training loop in virtual time, over engines and a learner that only wait."""
