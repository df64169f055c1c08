"""A policy in a conversation and the log-probs of its responses, written for TorchRL."""

import sys

from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import ChatHistory, TransformersWrapper
from transformers import AutoModelForCausalLM, AutoTokenizer

path = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)
policy = TransformersWrapper(
    model,
    tokenizer=tokenizer,
    input_mode="history",
    generate=True,
    generate_kwargs={"max_new_tokens": 8, "do_sample": True, "temperature": 1.0},
    return_log_probs=True,
)

env = ChatEnv(batch_size=(2,), tokenizer=tokenizer, input_mode="history", system_prompt="You are brief.")
root = env.reset(TensorDict({"query": ["Where is Rome?", "And Paris?"]}, batch_size=(2,)))
answered = policy(root)
following = env.step(answered)["next"]
said = following[0]["history"].prompt.to_chats()[-1]
assert said["role"] == "assistant", said

history = History.from_chats([[{"role": "user", "content": "What is 2 + 2?"}]])
asked = TensorDict(history=ChatHistory(prompt=history, batch_size=(1,)), batch_size=(1,))
out = policy(asked)
scorer = policy.get_new_version(generate=False, input_mode="tokens")
scored = scorer(TensorDict(tokens=out["tokens"], batch_size=(1,)))
sampled = out.get(("log_probs", "response"), as_list=True)[0]
again = scored.get(("log_probs", "full"), as_list=True)[0][-len(sampled) :]
assert (sampled - again).abs().max() < 1e-4
print("conversation held")
