"""SkyRL's import paths of its inference engine client. The engines themselves are in `skyrl_train.engines`."""
