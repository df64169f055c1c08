"""Two steps of GRPO, written for TorchRL."""

import copy
import sys

import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs.llm import GSM8KEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import AutoModelForCausalLM, AutoTokenizer

path = sys.argv[1]
rows = [{"question": f"{n} + {n} = ?", "answer": f"#### {2 * n}"} for n in range(1, 5)]
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)
sampler = TransformersWrapper(
    copy.deepcopy(model), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8, "temperature": 1.0}
)
loss_fn = GRPOLoss(TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False))
buffer = ReplayBuffer(
    storage=LazyStackStorage(8),
    sampler=SamplerWithoutReplacement(),
    batch_size=4,
    transform=MCAdvantage(grpo_size=2, prompt_key="question"),
)
env = GSM8KEnv(dataset=rows, num_envs=4, repeats=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
collector = LLMCollector(
    env, policy=sampler, dialog_turns_per_batch=4, total_dialog_turns=8, flatten_data=True, track_policy_version=True
)
losses = []
for data in collector:
    buffer.extend(data)
    for batch in buffer:
        loss = loss_fn(batch)
        loss.loss_objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.loss_objective))
    buffer.empty()
    collector.update_policy_weights_(model)
collector.shutdown()
assert len(losses) == 2, losses
print("two steps of GRPO")
