"""How far a mixture of experts' log-probs in an engine are from the trainer's, and what routing replay does about it.

The transformers engine in bfloat16 samples from a random model; the trainer, in bfloat16 as well, scores the same
tokens: with its own choice of experts, and with the engine's (`trainer.moe_routing_replay=rollout`). Both round
differently, so now and then a router prefers another expert, and the token's log-prob jumps. `--float32` shows what
remains without rounding.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import torch
from measure import about, line
from torch import Tensor

from skyrl_train.data.arrays import token_array
from skyrl_train.data.batch import TrainBatch, collate
from skyrl_train.data.trajectory import Prompt, Trajectory, TrajectoryGroup
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.models.token_scorer import TokenScorer
from skyrl_train.rollouts.ledger import Ledger
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model

SEQUENCES, TOKENS = 64, 64


def save_model(folder: Path) -> str:
    """8 layers of 16 experts, 4 for each token."""
    model = tiny_model("qwen3_moe", hidden_size=128, layers=8)
    config = type(model.config)(
        **{**model.config.to_dict(), "num_local_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True}
    )
    torch.manual_seed(0)
    type(model)(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


async def sample(model: str, dtype: str) -> TrainBatch:
    engine = TransformersEngine(model, dtype=dtype, max_num_seqs=SEQUENCES, keeps_routing=True)
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    prompts = [tuple(range(3 + index, 13 + index)) for index in range(SEQUENCES)]
    try:
        requests = [SampleRequest(str(i), token_array(ids), sampling, seed=i) for i, ids in enumerate(prompts)]
        completions = await engine.generate(requests)
    finally:
        await engine.close()
    groups = []
    for prompt, completion in zip(prompts, completions, strict=True):
        row = Prompt(completion.request_id, [], "none")
        ledger = Ledger(item := Trajectory.empty(row, 0, 1.0))
        ledger.open(list(prompt))
        ledger.sample(completion)
        groups.append(TrajectoryGroup(row, [item]))
    return collate(groups)


def score(scorer: TokenScorer, batch: TrainBatch, replay: bool) -> tuple[Tensor, Tensor]:
    """Log-probs [T], and the experts that the router chose."""
    scorer.routers.keeps_choices = True
    tensors = (batch.input_ids.long(), batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    with torch.no_grad():
        logprobs = scorer(*tensors, routing=batch.routing if replay else None).logprobs
    assert scorer.choices is not None
    return logprobs, scorer.choices


def show(dtype: str, batch: TrainBatch, scorer: TokenScorer) -> None:
    mask = batch.loss_mask
    assert batch.rollout_logprobs is not None and batch.routing is not None
    known = (batch.routing >= 0).all(-1).all(-1)
    for replay in (False, True):
        logprobs, choices = score(scorer, batch, replay)
        ratio = (logprobs - batch.rollout_logprobs)[mask].double()
        kl = (ratio.exp() - 1 - ratio).mean()
        others = (choices.sort(-1).values != batch.routing.sort(-1).values).any(-1)[known].double().mean()
        print(
            f"| {dtype} | {'rollout' if replay else 'none'} | {others:.2%} | {ratio.abs().mean():.4f} "
            f"| {ratio.abs().max():.3f} | {kl:.6f} | {(ratio.exp() - 1).abs().gt(0.2).double().mean():.2%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--float32", action="store_true")
    arguments = parser.parse_args()
    dtype = "float32" if arguments.float32 else "bfloat16"
    print(line(about("torch", "transformers")))
    print("\n| dtype | replay | other experts | log-prob gap, mean | largest | k3 | ratios beyond 0.2 |")
    print("| --- " * 7 + "|")
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        batch = asyncio.run(sample(model, dtype))
        show(dtype, batch, TokenScorer(load_causal_lm(model, dtype=getattr(torch, dtype))))


if __name__ == "__main__":
    main()
