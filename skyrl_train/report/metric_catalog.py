"""Every metric of a run: what it is, its unit, and what a healthy run shows. docs/metrics.md is made from this."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A name, in which {x} stands for a word that the run chooses, or a family of names."""

    name: str
    unit: str
    description: str
    healthy: str = ""

    def matches(self, name: str) -> bool:
        return re.fullmatch(re.sub(r"\\{\w+\\}", r".+", re.escape(self.name)), name) is not None


SECONDS, TOKENS, SHARE, NATS, GIB, RATIO, COUNT, STEPS, SCORE = (
    "s",
    "tokens",
    "0 to 1",
    "nats",
    "GiB",
    "ratio",
    "number",
    "steps",
    "reward",
)

METRICS = (
    Metric("reward/mean", SCORE, "mean reward of the step's samples", "rises, slower as the run goes on"),
    Metric("reward/std", SCORE, "standard deviation of the samples' rewards", "above 0: equal rewards teach nothing"),
    Metric("reward/pass_at_{n}", SHARE, "prompts of which at least one of n samples was right", "above reward/mean"),
    Metric(
        "reward/zero_variance_groups",
        SHARE,
        "prompts whose samples all had the same reward",
        "below 0.5; near 1 at the start: prompts are too hard, near 1 later: they are too easy",
    ),
    Metric("reward/length_penalty", SCORE, "what the soft overlong penalty took off", "shrinks towards 0"),
    Metric("reward/mean_drawn", SCORE, "mean reward of all groups drawn, those that dynamic sampling dropped included"),
    Metric("response/mean_tokens", TOKENS, "sampled tokens of a response, all turns, mean", "no jumps"),
    Metric("response/max_tokens", TOKENS, "sampled tokens of the longest response", "below the limit"),
    Metric(
        "response/observation_tokens",
        TOKENS,
        "tokens that a response has between its turns, mean: tool results, other observations, headers of messages",
    ),
    Metric(
        "response/truncated_fraction",
        SHARE,
        "responses that reached the length limit",
        "below 0.1: what is cut is scored without its end",
    ),
    Metric("episode/turns", COUNT, "turns of an episode, mean"),
    Metric("episode/max_turns", COUNT, "turns of the longest episode"),
    Metric(
        "episode/sequences", COUNT, "sequences that an episode is trained as; above 1 where its history was changed"
    ),
    Metric("environment/{name}", "the environment's", "what the environment measured, mean over episodes"),
    Metric("rollouts/tokens", TOKENS, "sampled tokens of all responses of the step"),
    Metric("rollouts/trajectories", COUNT, "episodes of the step"),
    Metric("rollouts/failed", COUNT, "episodes that failed and are masked", "0"),
    Metric("rollouts/failed/{kind}", COUNT, "those that failed in this way", "0"),
    Metric("rollouts/max_staleness", STEPS, "age of the oldest token trained on", "at most the bound"),
    Metric("sampling/drawn", COUNT, "groups that dynamic sampling drew for the step"),
    Metric("sampling/dropped", COUNT, "of these, dropped as all their rewards were the same", "less than half"),
    Metric("sampling/repeated", COUNT, "groups repeated in place of dropped ones", "0"),
    Metric("sampling/masked", COUNT, "groups masked as all their rewards were the same"),
    Metric("sampling/cut", COUNT, "groups that over-provisioning cut off"),
    Metric("sampling/left_out", COUNT, "prompts that the curriculum left out"),
    Metric("advantages/mean", SCORE, "mean advantage of a token", "near 0"),
    Metric("advantages/abs_mean", SCORE, "mean size of an advantage", "above 0"),
    Metric("advantages/abs_max", SCORE, "the largest advantage", "below 10"),
    Metric("advantages/zero_fraction", SHARE, "tokens whose advantage is 0: nothing is learnt from them", "below 0.5"),
    Metric("policy/loss", "loss", "the whole loss: policy, KL and entropy terms", "no trend is expected"),
    Metric("policy/policy_loss", "loss", "the policy's term of it", "no trend is expected"),
    Metric("policy/kl", NATS, "estimate of the KL divergence from the reference", "grows slowly, below 1"),
    Metric("policy/kl_in_reward", NATS, "the same, where the reward pays for it", "grows slowly"),
    Metric("policy/kl_coef", RATIO, "its coefficient, which an adaptive controller moves"),
    Metric(
        "policy/entropy",
        NATS,
        "entropy of the policy's next token",
        "falls slowly; at 0 nothing new is tried any more",
    ),
    Metric("policy/ratio", RATIO, "probability in the update over that before the step, mean", "0.9 to 1.1"),
    Metric("policy/ratio_max", RATIO, "the largest of these", "below 10"),
    Metric("policy/clip_ratio", SHARE, "tokens whose ratio was clipped", "0.001 to 0.2"),
    Metric("policy/grad_norm", RATIO, "norm of the gradient before it is clipped", "no spikes"),
    Metric("policy/skipped", SHARE, "updates skipped as their gradient was not finite", "0"),
    Metric("policy/lr", "rate", "learning rate of the last optimizer step"),
    Metric(
        "policy/router_load_max",
        RATIO,
        "tokens of the expert that got most, over the mean of its layer's",
        "falls, or stays below 3",
    ),
    Metric("policy/router_aux_loss", "loss", "the loss that keeps the load even, times its coefficient", "falls"),
    Metric("policy/router_unused", SHARE, "experts that got no token of an update", "near 0"),
    Metric("policy/optimizer_steps", COUNT, "optimizer steps of the step"),
    Metric("policy/{name}", "the loss's", "what a loss of your own, or an option of the policy's, measured"),
    Metric("critic/loss", "loss", "squared error of the values", "falls"),
    Metric("critic/explained_variance", SHARE, "variance of the returns that the values explain", "rises above 0"),
    Metric("critic/value_mean", SCORE, "mean value", "near the mean reward"),
    Metric("critic/clip_ratio", SHARE, "tokens whose value was clipped", "below 0.2"),
    Metric("critic/{name}", "as the policy's", "the critic's own: grad_norm, skipped, optimizer steps"),
    Metric("sft/loss", NATS, "cross entropy of the demonstrations' tokens", "falls"),
    Metric(
        "mismatch/ratio_mean",
        RATIO,
        "probability of a sampled token in the trainer over that in the engine, mean",
        "0.99 to 1.01: they compute the same policy",
    ),
    Metric("mismatch/ratio_max", RATIO, "the largest of these", "below 10"),
    Metric("mismatch/ratio_min", RATIO, "the smallest of these", "above 0.1"),
    Metric("mismatch/ratio_std", RATIO, "their standard deviation", "below 0.1"),
    Metric("mismatch/kl", NATS, "KL divergence of the trainer from the engine", "below 0.001; in bfloat16 below 0.01"),
    Metric("mismatch/ess_tokens", SHARE, "effective sample size of importance weights, over tokens", "above 0.9"),
    Metric("mismatch/ess_sequences", SHARE, "the same over whole sequences", "above 0.5"),
    Metric("rollout/logprob_diff", NATS, "size of the difference of both log-probs, mean", "below 0.01"),
    Metric("rollout/logprob_diff_max", NATS, "the largest of these", "below 1"),
    Metric("rollout/kl", NATS, "as mismatch/kl, after corrections have masked tokens"),
    Metric("correction/truncated_tokens", SHARE, "tokens whose importance weight was truncated", "below 0.05"),
    Metric("correction/truncated_sequences", SHARE, "the same of sequences", "below 0.2"),
    Metric("correction/masked_tokens", SHARE, "tokens masked for their ratio", "below 0.05"),
    Metric("correction/masked_sequences", SHARE, "sequences masked for their ratio", "below 0.2"),
    Metric("correction/outlier_sequences", SHARE, "sequences masked for one token's ratio", "below 0.05"),
    Metric("async/staleness_min", STEPS, "least age of the tokens trained on, mean over turns"),
    Metric("async/staleness_mean", STEPS, "their mean age", "well below the bound"),
    Metric("async/staleness_max", STEPS, "their greatest age", "at most the bound"),
    Metric("async/trainer_idle", SHARE, "of the step, in which the trainer waited for rollouts", "below 0.1"),
    Metric("async/engines_idle", SHARE, "of the time, in which an engine had no request, mean", "below 0.1"),
    Metric("async/in_flight", COUNT, "groups that are being sampled when the step begins", "not always 0"),
    Metric("async/queue", COUNT, "groups that wait to be trained on when the step begins", "not always 0"),
    Metric("async/wasted_tokens", TOKENS, "tokens that were sampled for nothing, as a pause ended them", "0 with keep"),
    Metric("engines/tokens_per_s", "tokens/s", "tokens sampled, over the time in which requests were running"),
    Metric("engines/prefix_cache_hit_rate", SHARE, "prompt tokens that needed no prefill", "high for groups and turns"),
    Metric("engines/running", COUNT, "requests in the engines when the step's numbers were taken"),
    Metric("engines/queued", COUNT, "requests that wait for an engine then"),
    Metric("engines/count", COUNT, "engines that take requests: neither dead nor about to leave", "as many as wanted"),
    Metric("engines/dead", COUNT, "engines that are dead", "0"),
    Metric("engines/restarts", COUNT, "restarts of engines since the run began", "0"),
    Metric("trainer/restarts", COUNT, "restarts of the trainer's ranks since the run began; only after one"),
    Metric("trainer/ranks", COUNT, "the policy's ranks; only after a restart"),
    Metric("weights/version", STEPS, "the step whose weights the engines hold"),
    Metric("weights/bytes", "bytes", "bytes that a sync sent"),
    Metric("weights/buckets", COUNT, "in so many pieces"),
    Metric("weights/probe_gap", NATS, "largest difference of log-probs, engine and trainer", "1e-4; 0.25 in bfloat16"),
    Metric("weights/probe_gap_mean", NATS, "mean difference of these", "below 1e-5; 0.05 in bfloat16"),
    Metric("weights/rehearsal_gap", NATS, "the same with altered weights, before the first step", "far above the gap"),
    Metric("throughput/tokens_per_s", "tokens/s", "tokens of the step's responses, over the whole step"),
    Metric("timing/step_s", SECONDS, "the whole step, evaluation and checkpoint apart"),
    Metric("timing/generate_s", SECONDS, "waiting for rollouts"),
    Metric("timing/response_s", SECONDS, "sampling a response, all its turns, mean"),
    Metric("timing/score_s", SECONDS, "log-probs of policy, reference and critic"),
    Metric("timing/update_s", SECONDS, "optimizer steps"),
    Metric("timing/publish_s", SECONDS, "sending weights to the engines"),
    Metric("timing/move_s", SECONDS, "engines and trainer on and off an accelerator that they share"),
    Metric("timing/evaluate_s", SECONDS, "an evaluation"),
    Metric("memory/learner_peak_rss_gib", GIB, "host memory of the rank that needed most, since its start"),
    Metric("memory/learner_peak_gib", GIB, "on accelerators: what torch had allocated there"),
    Metric("memory/engine_{name}", GIB, "the same of the engine that needed most"),
    Metric(
        "eval/{source}/avg_score",
        SCORE,
        "mean reward of an evaluation, by data source; all: over all (a source of this name is source_all); "
        "other_sources: over those beyond the first 256, and those whose names have more than 128 characters",
        "rises",
    ),
    Metric("eval/{source}/pass_at_{n}", SHARE, "prompts of which at least one of n samples was right", "rises"),
    Metric("eval/{source}/num_failed", COUNT, "episodes that failed, and count as reward 0", "0"),
)
"""In the order in which people read them; of several that match, the first one."""


def metric_of(name: str) -> Metric | None:
    """What is known of a metric of this name; None of one that a user's own code has added."""
    return next((metric for metric in METRICS if metric.matches(name)), None)
