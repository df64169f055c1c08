"""Expert iteration: keep the best answers to each question, and train on them with supervised learning.

python examples/torchrl/expert_iteration.py MODEL --engine vllm
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from letters import make_env
from tensordict import TensorDictBase, set_list_to_stack
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.tensordict import (
    AsyncVLLM,
    LLMCollector,
    RetrieveLogProb,
    SFTLoss,
    TopKRewardSelector,
    TransformersWrapper,
    VLLMWeightSyncScheme,
    get_model_metadata,
    vLLMWrapper,
)

ROWS, REPEATS, BEST, STEPS, RATE = 64, 8, 2, 20, 3e-3
SAMPLING = {"max_new_tokens": 8, "temperature": 1.0}

parser = argparse.ArgumentParser()
parser.add_argument("model", help="path of a model")
parser.add_argument("--steps", type=int, default=STEPS)
parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
arguments = parser.parse_args()
set_list_to_stack(True).set()

tokenizer = AutoTokenizer.from_pretrained(arguments.model)
model = AutoModelForCausalLM.from_pretrained(arguments.model)
scoring: dict[str, Any] = {"tokenizer": tokenizer, "input_mode": "history", "generate": False, "return_log_probs": True}
policy_training = TransformersWrapper(model, **scoring)
reference = TransformersWrapper(copy.deepcopy(model), log_probs_key="ref_log_probs", **scoring)
if arguments.engine == "vllm":
    server = AsyncVLLM.from_pretrained(arguments.model, num_replicas=1, enforce_eager=True, max_model_len=256)
    policy = vLLMWrapper(server, tokenizer=tokenizer, input_mode="history", generate_kwargs=SAMPLING)
else:
    policy = TransformersWrapper(
        copy.deepcopy(model), tokenizer=tokenizer, input_mode="history", generate_kwargs=SAMPLING
    )

replay_buffer = ReplayBuffer(
    storage=LazyStackStorage(ROWS // REPEATS * BEST),
    sampler=SamplerWithoutReplacement(),
    transform=TopKRewardSelector(total_dialog_turns=REPEATS, topk_size=BEST, prompt_key="query"),
    batch_size=ROWS // REPEATS * BEST // 2,
)
rewards: list[torch.Tensor] = []


def record_reward(batch: TensorDictBase) -> TensorDictBase:
    rewards.append(torch.as_tensor(batch["next", "reward"]).mean())
    return batch


env = make_env(tokenizer, ROWS, REPEATS)
env = env.append_transform(
    RetrieveLogProb(reference, assistant_only=True, log_probs_full_key=("ref_log_probs", "full"))
)
collector = LLMCollector(
    env,
    policy=policy,
    dialog_turns_per_batch=ROWS,
    total_dialog_turns=ROWS * arguments.steps,
    replay_buffer=replay_buffer,
    postproc=record_reward,
)
loss_fn = SFTLoss(policy_training, tokenizer=tokenizer, kl_to_ref_coeff=0.001)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
if arguments.engine == "vllm":
    sender = VLLMWeightSyncScheme(num_replicas=1).create_sender()
    sender.register_model(model)
    sender.register_collector(collector)
    sender.init_all_workers_group(get_model_metadata(model), vllm_engine=server)

for step, _ in enumerate(collector, start=1):
    if not len(replay_buffer):  # all answers to each question are equally good
        continue
    for batch in replay_buffer:
        loss = loss_fn(batch)
        (loss.loss_sft + loss.loss_kl_to_ref).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"step {step}: reward {rewards[-1]:.3f}, loss {loss.loss_sft.item():.3f}", flush=True)
    if arguments.engine == "vllm":
        sender.update_weights()
    else:
        collector.update_policy_weights_(policy_training)
    replay_buffer.empty()
collector.shutdown()
if arguments.engine == "vllm":
    server.shutdown()
