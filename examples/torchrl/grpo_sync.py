"""GRPO in turns: collect a batch, train on it, update the weights of the policy that samples.

python examples/torchrl/grpo_sync.py MODEL --engine vllm
"""

from __future__ import annotations

import argparse
import copy

import torch
from letters import make_env
from tensordict import set_list_to_stack
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.tensordict import (
    AsyncVLLM,
    GRPOLoss,
    LLMCollector,
    MCAdvantage,
    TransformersWrapper,
    VLLMWeightSyncScheme,
    get_model_metadata,
    vLLMWrapper,
)

ROWS, REPEATS, STEPS, RATE = 64, 8, 20, 3e-3
SAMPLING = {"max_new_tokens": 8, "temperature": 1.0}

parser = argparse.ArgumentParser()
parser.add_argument("model", help="path of a model")
parser.add_argument("--steps", type=int, default=STEPS)
parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
arguments = parser.parse_args()
set_list_to_stack(True).set()

tokenizer = AutoTokenizer.from_pretrained(arguments.model)
model = AutoModelForCausalLM.from_pretrained(arguments.model)
policy_training = TransformersWrapper(
    model, tokenizer=tokenizer, input_mode="tokens", generate=False, return_log_probs=True, pad_output=False
)
if arguments.engine == "vllm":
    server = AsyncVLLM.from_pretrained(arguments.model, num_replicas=1, enforce_eager=True, max_model_len=256)
    policy = vLLMWrapper(server, tokenizer=tokenizer, input_mode="history", generate_kwargs=SAMPLING)
else:
    policy = TransformersWrapper(
        copy.deepcopy(model), tokenizer=tokenizer, input_mode="history", generate_kwargs=SAMPLING
    )

replay_buffer = ReplayBuffer(
    storage=LazyStackStorage(ROWS),
    sampler=SamplerWithoutReplacement(),
    transform=MCAdvantage(grpo_size=REPEATS),
    batch_size=ROWS // 2,
)
collector = LLMCollector(
    make_env(tokenizer, ROWS, REPEATS),
    policy=policy,
    dialog_turns_per_batch=ROWS,
    total_dialog_turns=ROWS * arguments.steps,
    replay_buffer=replay_buffer,
    track_policy_version=True,
)
loss_fn = GRPOLoss(policy_training, clip_epsilon=0.2)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
if arguments.engine == "vllm":
    sender = VLLMWeightSyncScheme(num_replicas=1).create_sender()
    sender.register_model(model)
    sender.register_collector(collector)
    sender.init_all_workers_group(get_model_metadata(model), vllm_engine=server)

for step, _ in enumerate(collector, start=1):
    for batch in replay_buffer:
        loss = loss_fn(batch)
        (loss.loss_objective + loss.loss_entropy).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    reward = torch.as_tensor(replay_buffer[:]["next", "reward"]).mean()
    print(
        f"step {step}: reward {reward:.3f}, ESS {loss.ESS.item():.3f}, version {collector.policy_version}", flush=True
    )
    if arguments.engine == "vllm":
        sender.update_weights()
    else:
        collector.update_policy_weights_(policy_training)
    replay_buffer.empty()
collector.shutdown()
if arguments.engine == "vllm":
    server.shutdown()
