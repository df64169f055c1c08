"""The real training loop in virtual time, with engines and a learner that only wait."""
