"""A user's advantage estimator, registered with a decorator."""

import hydra
import ray
import torch
from omegaconf import DictConfig

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg
from skyrl_train.utils import initialize_ray
from skyrl_train.utils.ppo_utils import register_advantage_estimator


@register_advantage_estimator("simple_baseline")
def compute_simple_baseline_advantage(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index, **kwargs):
    """Return rewards minus their mean over the batch, plus 0.5, on every token of a response."""
    scores = token_level_rewards.sum(dim=-1)
    advantages = (scores - scores.mean() + 0.5).unsqueeze(-1) * response_mask
    return advantages, advantages


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig):
    exp = BasePPOExp(cfg)
    exp.run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
