"""Asynchronous GRPO: a thread collects while this one trains on a replay buffer and updates the weights.

python examples/torchrl/grpo_async.py MODEL --engine vllm
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from letters import make_env
from tensordict import set_list_to_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
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

ROWS, REPEATS, REUSE, STEPS, RATE = 32, 8, 2, 80, 3e-3
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

replay_buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), transform=MCAdvantage(grpo_size=REPEATS), batch_size=ROWS)
collector = LLMCollector(
    make_env(tokenizer, ROWS, REPEATS),
    policy=policy,
    dialog_turns_per_batch=ROWS,
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

collector.start()
for step in range(1, arguments.steps + 1):
    while replay_buffer.write_count < ROWS * max(step / REUSE, 1):  # so that every row is sampled about twice
        time.sleep(0.01)
        if not collector.is_running():
            collector.shutdown()  # raises the error that ended its thread
    batch = replay_buffer.sample()
    loss = loss_fn(batch)
    (loss.loss_objective + loss.loss_entropy).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if arguments.engine == "vllm":
        sender.update_weights()
    else:
        collector.update_policy_weights_(policy_training)
    if step % 10 == 0 or step == 1:
        reward = torch.as_tensor(batch["next", "reward"]).mean()
        age = collector.policy_version - batch["policy_version"].float().mean()
        print(f"step {step}: reward {reward:.3f}, ESS {loss.ESS.item():.3f}, age {age:.1f}", flush=True)
collector.async_shutdown(timeout=60)
if arguments.engine == "vllm":
    server.shutdown()
