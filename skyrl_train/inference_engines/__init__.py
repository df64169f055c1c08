"""SkyRL's view of the inference engines, by its names; the engines themselves are in `skyrl_train.engines`."""
