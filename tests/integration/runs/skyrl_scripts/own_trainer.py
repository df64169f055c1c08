"""A subclass of the trainer: losses on the first tokens only, a teacher's log-probs as rewards, and notes around it."""

import os

import hydra
import ray
import torch
from omegaconf import DictConfig

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg
from skyrl_train.generators.base import GeneratorOutput
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.utils import initialize_ray
from skyrl_train.utils.ppo_utils import register_advantage_estimator


@register_advantage_estimator("no_op")
def compute_no_op_advantage(token_level_rewards: torch.Tensor, **kwargs):
    return token_level_rewards, token_level_rewards


class DistillingTrainer(RayPPOTrainer):
    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        lengths = [len(response) for response in generator_output["response_ids"]]
        generator_output["loss_masks"] = [mask[:4] + [0] * len(mask[4:]) for mask in generator_output["loss_masks"]]
        self.all_metrics.update({"mine/longest": max(lengths), "mine/uids": len(set(uids))})
        return super().postprocess_generator_output(generator_output, uids)

    def apply_reward_kl_penalty(self, data: TrainingInputBatch) -> TrainingInputBatch:
        gap = data["base_action_log_probs"] - data["action_log_probs"]
        data["rewards"] = gap * data["loss_mask"]
        self.all_metrics["mine/step"] = self.global_step
        return data

    def train(self):
        notes = os.path.join(self.cfg.trainer.ckpt_path, "notes.txt")
        with open(notes, "a") as file:
            file.write("before\n")
        super().train()
        with open(notes, "a") as file:
            file.write(f"after step {self.global_step - 1}\n")


class DistillationExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return DistillingTrainer(*args, **kwargs)


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig):
    exp = DistillationExp(cfg)
    exp.run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
