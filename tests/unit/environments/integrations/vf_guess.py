"""Environments for the verifiers library, which the tests load by `env_id`."""

import verifiers as vf
from datasets import Dataset

QUESTIONS = [{"question": "6 * 3?", "answer": "18"}, {"question": "2 * 4?", "answer": "8"}]


def last_text(completion):
    return [message["content"] for message in completion if message["role"] == "assistant"][-1]


def right(completion, answer, **kwargs):
    return float(answer in last_text(completion))


def short(completion, **kwargs):
    return 1.0 if len(last_text(completion)) < 10 else 0.0


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        text = messages[-1]["content"]
        if text == "break":
            raise vf.ToolError("the environment's own error")
        if state["answer"] in text:
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return []
        return [{"role": "user", "content": f"{len(state['trajectory'])} guesses"}]


def load_environment(turns: int = 1, rewrites: bool = False):
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.5])
    dataset = Dataset.from_list(QUESTIONS)
    if turns == 1:
        return vf.SingleTurnEnv(dataset=dataset, eval_dataset=dataset, rubric=rubric, system_prompt="Be short.")
    return Guess(dataset=dataset, rubric=rubric, max_turns=turns)
