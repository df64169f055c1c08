"""TorchRL's base classes of transforms, under the module's name of earlier releases."""

from __future__ import annotations

from torchrl.envs import StepCounter as StepCounter, Transform as Transform
