"""A user's environment for the `skyrl-gym` package, registered with that package."""

from typing import Any

import hydra
import ray
from omegaconf import DictConfig
from skyrl_gym.envs import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg
from skyrl_train.utils import initialize_ray


class ShoutEnv(BaseTextEnv):
    """Two turns; rewards capital letters."""

    def __init__(self, env_config: DictConfig, extras: dict[str, Any] | None = None):
        super().__init__()
        self.max_turns = extras["max_turns"]
        self.bonus = env_config.bonus
        self.capitals = 0

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        capitals = sum(letter.isupper() for letter in action)
        self.capitals += capitals
        done = self.turns >= self.max_turns
        observations = [] if done else [{"role": "user", "content": "louder"}]
        reward = self.bonus * capitals / max(len(action), 1)
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={})

    def get_metrics(self) -> dict[str, Any]:
        return {"capitals": self.capitals}


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig):
    register(id="shout", entry_point=ShoutEnv)
    exp = BasePPOExp(cfg)
    exp.run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
