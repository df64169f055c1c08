"""Adapters that let programs written for SkyRL run on this package.

Modules at SkyRL's import paths (`skyrl_train.generators`, `skyrl_train.utils`, `skyrl_train.trainer`, ...) export these
classes and functions under SkyRL's names. docs/guides/from_skyrl.md lists what has moved and what replaces the rest.
"""
