"""SkyRL's generators, by its names."""
