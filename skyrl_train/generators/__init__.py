"""SkyRL's import paths of its generators."""
