"""A user's generator, written to SkyRL's interface: it calls the engines and computes rewards by its own rule."""

import hydra
import ray
from omegaconf import DictConfig

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg
from skyrl_train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl_train.generators.utils import get_rollout_metrics
from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.utils import initialize_ray


class VariedGenerator(GeneratorInterface):
    """Rewards the share of distinct tokens in responses, token by token or for the complete response."""

    def __init__(self, cfg: DictConfig, inference_engine_client: InferenceEngineClient, tokenizer):
        self.by_token = cfg.generator.my_rewards == "by_token"
        self.client = inference_engine_client
        self.tokenizer = tokenizer

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        prompt_ids = self.tokenizer.apply_chat_template(
            input_batch["prompts"], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        answers = await self.client.generate(
            InferenceEngineInput(
                prompt_token_ids=prompt_ids,
                sampling_params=input_batch["sampling_params"],
                session_ids=[trajectory_id.to_string() for trajectory_id in input_batch["trajectory_ids"]],
            )
        )
        response_ids = answers["response_ids"]
        rewards = [[float(token not in ids[:position]) for position, token in enumerate(ids)] for ids in response_ids]
        if not self.by_token:
            rewards = [sum(values) / len(values) for values in rewards]
        metrics = get_rollout_metrics(response_ids, rewards)
        metrics["generate/batch"] = len(response_ids)
        metrics["generate/step"] = input_batch["batch_metadata"].global_step
        return {
            "prompt_token_ids": prompt_ids,
            "response_ids": response_ids,
            "rewards": rewards,
            "loss_masks": [[1] * len(ids) for ids in response_ids],
            "stop_reasons": answers["stop_reasons"],
            "rollout_metrics": metrics,
            "rollout_logprobs": answers["response_logprobs"],
        }


class VariedExp(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return VariedGenerator(cfg, inference_engine_client, tokenizer)


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig):
    exp = VariedExp(cfg)
    exp.run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
