"""Catalog of a run's metrics: meaning, unit and healthy values. docs/reference/metrics.md is generated from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, or a family of metrics whose name contains placeholders such as `{source}`."""

    name: str
    unit: str
    description: str
    healthy: str = ""
    """Values or the trend of a healthy run; empty if none is typical."""

    def matches(self, name: str) -> bool:
        """True if `name` is this metric's name. Each placeholder matches one or more arbitrary characters."""
        return re.fullmatch(re.sub(r"\\{\w+\\}", r".+", re.escape(self.name)), name) is not None


SECONDS, TOKENS, FRACTION, NATS, GIB, RATIO, COUNT, STEPS, SCORE = (
    "s",
    "tokens",
    "0 to 1",
    "nats",
    "GiB",
    "ratio",
    "count",
    "steps",
    "reward",
)

METRICS = (
    Metric("reward/mean", SCORE, "mean reward of the step's samples", "rises, more slowly as the run continues"),
    Metric(
        "reward/std",
        SCORE,
        "standard deviation of the samples' rewards",
        "above 0: equal rewards give no training signal",
    ),
    Metric(
        "reward/pass_at_{n}",
        FRACTION,
        "fraction of prompts with at least one correct answer among n samples",
        "above reward/mean",
    ),
    Metric(
        "reward/zero_variance_groups",
        FRACTION,
        "fraction of prompts whose samples all have the same reward",
        "below 0.5; near 1 at the start: prompts are too hard, near 1 later: they are too easy",
    ),
    Metric(
        "reward/length_penalty",
        SCORE,
        "mean amount that the soft overlong penalty subtracted from a reward",
        "shrinks towards 0",
    ),
    Metric(
        "reward/mean_drawn",
        SCORE,
        "mean reward of all sampled groups, including those that dynamic sampling dropped",
    ),
    Metric("response/mean_tokens", TOKENS, "mean number of sampled tokens in a response, over all turns", "no jumps"),
    Metric("response/max_tokens", TOKENS, "number of sampled tokens in the longest response", "below the limit"),
    Metric(
        "response/observation_tokens",
        TOKENS,
        "mean number of tokens between the turns of a response: tool results, other observations, message headers",
    ),
    Metric(
        "response/truncated_fraction",
        FRACTION,
        "fraction of responses that reached the length limit",
        "below 0.1: a truncated response is graded without its end",
    ),
    Metric("episode/turns", COUNT, "mean number of turns in an episode"),
    Metric("episode/max_turns", COUNT, "number of turns in the longest episode"),
    Metric(
        "episode/sequences",
        COUNT,
        "mean number of training sequences per episode; above 1 if the chat history of an episode was rewritten",
    ),
    Metric(
        "environment/{name}",
        "set by the environment",
        "number that the environment reports, mean over episodes",
    ),
    Metric("agent/calls", COUNT, "mean number of answers that a program got from the model in an episode"),
    Metric(
        "agent/branches",
        COUNT,
        "mean number of calls of an episode, after its first, that did not continue an earlier call: the program "
        "changed the history or began another conversation",
    ),
    Metric(
        "agent/read_tokens",
        TOKENS,
        "mean number of tokens of an episode that the model read, without those that an earlier call had read",
        "no jumps: many are read again if the history changes",
    ),
    Metric(
        "agent/retokenized_messages",
        COUNT,
        "answers in the histories of programs whose sampled tokens could not be reused",
        "0",
    ),
    Metric("agent/malformed_calls", COUNT, "tool calls of the model that could not be parsed", "falls towards 0"),
    Metric(
        "agent/overridden_parameters",
        COUNT,
        "sampling parameters of programs that were ignored, because the run sets them",
    ),
    Metric("rollouts/tokens", TOKENS, "number of sampled tokens in all responses of the step"),
    Metric("rollouts/trajectories", COUNT, "episodes of the step"),
    Metric("rollouts/failed", COUNT, "episodes that failed and are masked", "0"),
    Metric("rollouts/failed/{kind}", COUNT, "episodes that failed in this way", "0"),
    Metric("rollouts/max_staleness", STEPS, "age of the oldest token trained on", "at most the staleness bound"),
    Metric("sampling/drawn", COUNT, "groups that dynamic sampling drew for the step"),
    Metric(
        "sampling/dropped",
        COUNT,
        "drawn groups that were dropped because all their rewards are equal",
        "less than half of the drawn groups",
    ),
    Metric("sampling/repeated", COUNT, "groups that are repeated in place of dropped ones", "0"),
    Metric("sampling/masked", COUNT, "groups that are masked because all their rewards are equal"),
    Metric("sampling/cancelled", COUNT, "surplus groups that over-provisioning cancelled"),
    Metric("sampling/curriculum_skipped", COUNT, "prompts that the curriculum skipped"),
    Metric("advantages/mean", SCORE, "mean advantage of a token", "near 0"),
    Metric("advantages/abs_mean", SCORE, "mean absolute advantage of a token", "above 0"),
    Metric("advantages/abs_max", SCORE, "largest absolute advantage of a token", "below 10"),
    Metric(
        "advantages/zero_fraction",
        FRACTION,
        "fraction of tokens whose advantage is 0: they give no training signal",
        "below 0.5",
    ),
    Metric("policy/loss", "loss", "total loss: policy, KL and entropy terms", "no trend is expected"),
    Metric("policy/policy_loss", "loss", "policy term of the loss", "no trend is expected"),
    Metric(
        "policy/kl", NATS, "estimated KL divergence of the policy from the reference model", "grows slowly, below 1"
    ),
    Metric("policy/kl_in_reward", NATS, "the same estimate, if the KL penalty is part of the reward", "grows slowly"),
    Metric("policy/kl_coef", RATIO, "coefficient of the KL term, which an adaptive controller may change"),
    Metric(
        "policy/entropy",
        NATS,
        "entropy of the policy's next-token distribution",
        "falls slowly; at 0 the policy no longer explores",
    ),
    Metric(
        "policy/ratio", RATIO, "mean ratio of token probabilities during the update and before the step", "0.9 to 1.1"
    ),
    Metric("policy/ratio_max", RATIO, "largest of these ratios", "below 10"),
    Metric("policy/clip_ratio", FRACTION, "fraction of tokens whose ratio was clipped", "0.001 to 0.2"),
    Metric("policy/grad_norm", RATIO, "norm of the gradient before clipping", "no spikes"),
    Metric("policy/skipped", FRACTION, "fraction of updates that were skipped for a gradient that is not finite", "0"),
    Metric("policy/lr", "rate", "learning rate of the last optimizer step"),
    Metric(
        "policy/router_load_max",
        RATIO,
        "tokens of a layer's busiest expert, divided by the mean over its experts; mean over layers",
        "falls, or stays below 3",
    ),
    Metric("policy/router_aux_loss", "loss", "load-balancing loss of the router, times its coefficient", "falls"),
    Metric(
        "policy/unused_expert_fraction", FRACTION, "fraction of experts that received no token of an update", "near 0"
    ),
    Metric("policy/optimizer_steps", COUNT, "optimizer steps of the training step"),
    Metric(
        "policy/{name}", "set by the loss", "number that a custom loss, or an optional term of the policy loss, reports"
    ),
    Metric("critic/loss", "loss", "squared error of the values", "falls"),
    Metric(
        "critic/explained_variance",
        FRACTION,
        "fraction of the variance of the returns that the values explain",
        "rises above 0",
    ),
    Metric("critic/value_mean", SCORE, "mean value", "near the mean reward"),
    Metric("critic/clip_ratio", FRACTION, "fraction of tokens whose value was clipped", "below 0.2"),
    Metric("critic/{name}", "as of the policy", "metric of the critic's updates: grad_norm, skipped, optimizer_steps"),
    Metric("sft/loss", NATS, "cross entropy of the demonstrations' tokens", "falls"),
    Metric(
        "mismatch/ratio_mean",
        RATIO,
        "mean ratio of a sampled token's probability in the trainer to that in the engine",
        "0.99 to 1.01: both compute the same policy",
    ),
    Metric("mismatch/ratio_max", RATIO, "largest of these ratios", "below 10"),
    Metric("mismatch/ratio_min", RATIO, "smallest of these ratios", "above 0.1"),
    Metric("mismatch/ratio_std", RATIO, "standard deviation of these ratios", "below 0.1"),
    Metric("mismatch/kl", NATS, "KL divergence of the trainer from the engine", "below 0.001; in bfloat16 below 0.01"),
    Metric("mismatch/ess_tokens", FRACTION, "effective sample size of importance weights, over tokens", "above 0.9"),
    Metric(
        "mismatch/ess_sequences", FRACTION, "effective sample size of importance weights, over sequences", "above 0.5"
    ),
    Metric(
        "rollout/logprob_diff",
        NATS,
        "mean absolute difference of a token's log-probs in trainer and engine",
        "below 0.01",
    ),
    Metric("rollout/logprob_diff_max", NATS, "largest of these differences", "below 1"),
    Metric("rollout/kl", NATS, "mismatch/kl after corrections have masked tokens"),
    Metric(
        "correction/truncated_tokens",
        FRACTION,
        "fraction of tokens whose importance weight was truncated",
        "below 0.05",
    ),
    Metric(
        "correction/truncated_sequences",
        FRACTION,
        "fraction of sequences whose importance weight was truncated",
        "below 0.2",
    ),
    Metric("correction/masked_tokens", FRACTION, "fraction of tokens masked because of their ratio", "below 0.05"),
    Metric("correction/masked_sequences", FRACTION, "fraction of sequences masked because of their ratio", "below 0.2"),
    Metric(
        "correction/outlier_sequences",
        FRACTION,
        "fraction of sequences masked because of the ratio of a single token",
        "below 0.05",
    ),
    Metric("async/staleness_min", STEPS, "minimum age of the tokens trained on, mean over turns"),
    Metric("async/staleness_mean", STEPS, "mean age of the tokens trained on", "well below the staleness bound"),
    Metric("async/staleness_max", STEPS, "maximum age of the tokens trained on", "at most the staleness bound"),
    Metric(
        "async/trainer_idle", FRACTION, "fraction of the step in which the trainer waited for rollouts", "below 0.1"
    ),
    Metric("async/engines_idle", FRACTION, "fraction of the time in which an engine had no request, mean", "below 0.1"),
    Metric("async/in_flight", COUNT, "groups that are being sampled when the step begins", "not always 0"),
    Metric("async/queue", COUNT, "groups that wait to be trained on when the step begins", "not always 0"),
    Metric(
        "async/wasted_tokens",
        TOKENS,
        "sampled tokens that were discarded because a pause ended their request",
        "0 with keep",
    ),
    Metric("engines/tokens_per_s", "tokens/s", "sampled tokens per second in which requests were running"),
    Metric(
        "engines/prefix_cache_hit_rate",
        FRACTION,
        "fraction of prompt tokens that needed no prefill",
        "high for groups and multi-turn episodes",
    ),
    Metric(
        "engines/accepted_drafts_per_step",
        TOKENS,
        "drafted tokens that a request accepted per step, mean, with speculative decoding",
        "every step samples one token more than this",
    ),
    Metric("engines/running", COUNT, "requests that engines were processing at the end of the step"),
    Metric("engines/queued", COUNT, "requests that were waiting for an engine at the end of the step"),
    Metric(
        "engines/count",
        COUNT,
        "engines that accept requests: neither dead nor draining",
        "the configured number",
    ),
    Metric("engines/dead", COUNT, "engines that are dead", "0"),
    Metric("engines/restarts", COUNT, "restarts of engines since the run began", "0"),
    Metric("trainer/restarts", COUNT, "restarts of the trainer's ranks since the run began; absent before the first"),
    Metric("trainer/ranks", COUNT, "ranks of the policy; absent before the first restart"),
    Metric("weights/version", STEPS, "step whose weights the engines hold"),
    Metric("weights/bytes", "bytes", "bytes that a weight sync sent"),
    Metric("weights/buckets", COUNT, "buckets that a weight sync sent"),
    Metric(
        "weights/changed",
        FRACTION,
        "elements whose bits changed since the last weight sync, with generator.weight_sync_only_changed",
        "0.01 to 0.03 in bfloat16",
    ),
    Metric(
        "weights/probe_gap",
        NATS,
        "largest difference of log-probs in engine and trainer after a weight sync",
        "1e-4; 0.25 in bfloat16",
    ),
    Metric("weights/probe_gap_mean", NATS, "mean difference of these log-probs", "below 1e-5; 0.05 in bfloat16"),
    Metric(
        "weights/self_test_gap",
        NATS,
        "largest difference of log-probs with altered weights, which the sync self-test sends before the first step",
        "far above weights/probe_gap",
    ),
    Metric(
        "throughput/tokens_per_s", "tokens/s", "tokens of the step's responses, divided by the time of the whole step"
    ),
    Metric("timing/step_s", SECONDS, "time of the whole step, without evaluation and checkpoint"),
    Metric("timing/generate_s", SECONDS, "time in which the step waited for rollouts"),
    Metric("timing/response_s", SECONDS, "mean time to sample a response, over all its turns"),
    Metric("timing/score_s", SECONDS, "time to compute log-probs of policy and reference model, and values"),
    Metric("timing/update_s", SECONDS, "time of the optimizer steps"),
    Metric("timing/publish_s", SECONDS, "time to send weights to the engines"),
    Metric(
        "timing/offload_s",
        SECONDS,
        "time to offload and reload engines and trainer that share accelerators, before rollouts and training; "
        "`timing/publish_s` includes that for a weight sync",
    ),
    Metric("timing/evaluate_s", SECONDS, "time of an evaluation"),
    Metric("memory/learner_peak_rss_gib", GIB, "peak host memory since the start, maximum over trainer ranks"),
    Metric(
        "memory/learner_peak_gib",
        GIB,
        "peak accelerator memory that torch allocated since the start, maximum over trainer ranks",
    ),
    Metric("memory/engine_{name}", GIB, "the same peak, maximum over engines"),
    Metric(
        "eval/{source}/avg_score",
        SCORE,
        "mean reward of an evaluation, by data source; all: over all sources (a source of this name is source_all); "
        "other_sources: over sources beyond the first 256, and sources whose names have more than 128 characters",
        "rises",
    ),
    Metric("eval/{source}/avg_score_stderr", SCORE, "standard error of avg_score over prompts"),
    Metric("eval/{source}/pass_at_{k}_stderr", FRACTION, "standard error of pass_at_k over prompts"),
    Metric(
        "eval/{source}/pass_at_{k}",
        FRACTION,
        "probability that at least one of k samples of a prompt is correct, estimated without bias from all samples "
        "(arXiv:2107.03374)",
        "rises",
    ),
    Metric("eval/{source}/num_failed", COUNT, "episodes that failed and count as reward 0", "0"),
)
"""Metrics in the order in which people read them. If several match a name, the first one describes it."""

DEPRECATED_NAMES: Mapping[str, str] = {
    "sampling/cut": "sampling/cancelled",
    "sampling/left_out": "sampling/curriculum_skipped",
    "timing/move_s": "timing/offload_s",
    "weights/rehearsal_gap": "weights/self_test_gap",
    "policy/router_unused": "policy/unused_expert_fraction",
    "critic/router_unused": "critic/unused_expert_fraction",
    "skyrl_http_requests_under_way": "skyrl_http_requests_in_progress",
}
"""Old name -> new name of renamed metrics. Both are written until the next release, for existing dashboards."""
_OLD_NAMES = {new: old for old, new in DEPRECATED_NAMES.items()}
_Value = TypeVar("_Value")


def metric_of(name: str) -> Metric | None:
    """Return the entry of the catalog that matches a metric's name; None if a user's own code added the metric."""
    return next((metric for metric in METRICS if metric.matches(name)), None)


def names_to_write(name: str) -> tuple[str, ...]:
    """Return the names under which a metric is written: its own name and, if it was renamed, its deprecated one."""
    return (name, _OLD_NAMES[name]) if name in _OLD_NAMES else (name,)


def add_deprecated_names(metrics: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return metrics with the value of every renamed metric under its deprecated name as well."""
    return {written: value for name, value in metrics.items() for written in names_to_write(name)}


def replace_deprecated_names(row: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return a row of metrics under current names only, so that rows of earlier versions read like new ones.

    A value under a current name wins over one under the deprecated name.
    """
    if DEPRECATED_NAMES.keys().isdisjoint(row):
        return dict(row)
    return {
        DEPRECATED_NAMES.get(name, name): value for name, value in row.items() if DEPRECATED_NAMES.get(name) not in row
    }
