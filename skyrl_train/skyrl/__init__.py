"""What programs written to SkyRL's interfaces find here: bridges from its classes to those that run.

Modules at SkyRL's paths (`skyrl_train.generators`, `skyrl_train.utils`, `skyrl_train.trainer`, ...) hand these out by
its names. docs/from_skyrl.md says what moved, and what has another way here.
"""
