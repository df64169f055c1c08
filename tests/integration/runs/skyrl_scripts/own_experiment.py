"""A subclass of the experiment with its own data, tracker and generator, which slightly changes SkyRL's own one."""

import json
import os

import hydra
import ray
from omegaconf import DictConfig

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg
from skyrl_train.generators.base import GeneratorInput, GeneratorOutput
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.utils import initialize_ray


class PolitelyGenerator(SkyRLGymGenerator):
    """Adds a word to the prompt of each episode, and does not train on the first token."""

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        for conversation in input_batch["prompts"]:
            conversation[-1]["content"] += " Please."
        output = await super().generate(input_batch)
        output["loss_masks"] = [[0, *mask[1:]] for mask in output["loss_masks"]]
        return output


class Rows:
    """Rows in the format of SkyRL's PromptDataset."""

    def __len__(self):
        return 8

    def __getitem__(self, item):
        extras = {"reward_spec": {"method": "rule", "ground_truth": str(item + 2)}, "data_source": "mine"}
        return [{"role": "user", "content": f"{item} + 2 = ?"}], None, extras, f"row-{item}"


class LinesTracker:
    """Writes logged metrics to a file."""

    def __init__(self, path: str):
        self.path = path

    def log(self, data, step, commit=False):
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **data}) + "\n")


class PoliteExp(BasePPOExp):
    def get_train_dataset(self):
        assert self.tokenizer.pad_token is not None
        return Rows()

    def get_tracker(self):
        return LinesTracker(os.path.join(self.cfg.trainer.export_path, "mine.jsonl"))

    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return PolitelyGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            model_name=cfg.trainer.policy.model.path,
        )


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig):
    os.makedirs(cfg.trainer.export_path, exist_ok=True)
    exp = PoliteExp(cfg)
    exp.run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
