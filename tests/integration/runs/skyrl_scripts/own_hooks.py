"""A trainer that overrides the methods of a step, written like programs of today's SkyRL except for the imports."""

import json
import os
import sys

import ray
import torch

from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.generators.base import GeneratorInput, GeneratorOutput
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.utils import SkyRLTrainConfig, Timer, initialize_ray, validate_cfg


class HookedTrainer(RayPPOTrainer):
    """Records every method that the run calls, masks first tokens and scales advantages."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.notes = os.path.join(self.cfg.trainer.export_path, "notes.jsonl")
        self.seen = 0

    def note(self, name: str, **values):
        with open(self.notes, "a") as file:
            file.write(json.dumps({"name": name, "step": self.global_step, **values}) + "\n")

    async def train(self):
        self.note("train")
        await super().train()

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        output = await super().generate(input_batch)
        self.note("generate", phase=input_batch["batch_metadata"].training_phase, count=len(output["response_ids"]))
        return output

    @torch.no_grad()
    def postprocess_generator_output(self, generator_output, uids):
        generator_output["lengths"] = [len(ids) for ids in generator_output["response_ids"]]
        generator_output["rewards"] = [float(entry % 4) for entry in range(len(uids))]
        generator_output, uids = super().postprocess_generator_output(generator_output, uids)
        return generator_output, uids

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> TrainingInputBatch:
        data = super().convert_to_training_input(generator_output, uids)
        data["loss_mask"][:, 0] = 0
        data["lengths"] = torch.tensor(generator_output["lengths"])
        self.note("convert_to_training_input", scored=data["action_log_probs"] is not None, uids=len(set(uids)))
        return data

    @torch.no_grad()
    def fwd_logprobs_values_reward(self, training_input: TrainingInputBatch):
        training_input = super().fwd_logprobs_values_reward(training_input)
        self.note("fwd_logprobs_values_reward", scored=training_input["action_log_probs"] is not None)
        return training_input

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        self.note("compute_advantages_and_returns", reward=data["rewards"].sum(dim=-1).mean().item())
        return super().compute_advantages_and_returns(data)

    def dump_data(self, data: TrainingInputBatch, file_name: str):
        super().dump_data(data, file_name)
        self.note("dump_data", file=file_name)

    def train_critic_and_policy(self, data: TrainingInputBatch):
        data["advantages"] = data["advantages"] / data["lengths"].unsqueeze(-1)
        with Timer("own_update", self.all_timings):
            status = super().train_critic_and_policy(data)
        self.seen += data["lengths"].numel()
        self.all_metrics.update({"mine/grad_norm": status["grad_norm"], "mine/seen": self.seen})
        self.note("train_critic_and_policy", trained=int(data["loss_mask"].sum()))
        return status

    def save_checkpoints(self) -> str:
        folder = super().save_checkpoints()
        with open(os.path.join(folder, "seen.json"), "w") as file:
            json.dump(self.seen, file)
        self.note("save_checkpoints", folder=folder)
        return folder

    def load_checkpoints(self):
        step, folder = super().load_checkpoints()
        if folder is not None:
            with open(os.path.join(folder, "seen.json")) as file:
                self.seen = json.load(file)
        self.note("load_checkpoints", folder=folder, seen=self.seen)
        return step, folder

    def save_models(self):
        super().save_models()
        self.note("save_models")

    def update_ref_with_policy(self):
        super().update_ref_with_policy()
        self.note("update_ref_with_policy")

    @torch.no_grad()
    async def eval(self, vllm_metrics_scraper=None):
        metrics = await super().eval(vllm_metrics_scraper)
        self.note("eval")
        return {**metrics, "eval/mine": 1.0}


class HookedExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return HookedTrainer(*args, **kwargs)


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: SkyRLTrainConfig):
    exp = HookedExp(cfg)
    exp.run()


def main() -> None:
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
