"""RowSampler samples from the requested distribution and returns log-probs of that distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from skyrl_train.engines.base import SamplingParams
from skyrl_train.engines.token_sampler import (
    RowSampler,
    inverse_cdf,
    mask_by_sorting,
    min_kept_prob,
    pack_arrays,
    random_uniform,
    unpack_arrays,
)

CPU = torch.device("cpu")
GOLDEN = 0x9E3779B97F4A7C15


def _draw(params: SamplingParams, logits: torch.Tensor, count: int, **more):
    return RowSampler([params] * count, [7] * count, range(count), CPU)(logits.expand(count, -1), **more)


def _reference(params: SamplingParams, logits: torch.Tensor, seen: list[int]) -> torch.Tensor:
    """Return the log-probs [V] of Hugging Face's logits processors."""
    steps: Any = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(torch.tensor([seen]), logits.clone().unsqueeze(0))[0].log_softmax(-1)


@pytest.mark.parametrize("vocabulary", [11, 700])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"repetition_penalty": 1.7},
        {"temperature": 1.4, "top_k": 6, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 0.8},
    ],
)
def test_tokens_and_logprobs_match_hugging_face(vocabulary, options):
    params = SamplingParams(max_tokens=1, **options)
    torch.manual_seed(3)
    logits = torch.randn(1, vocabulary) * 1.5
    seen = torch.zeros(vocabulary, dtype=torch.bool)
    seen[[1, 3]] = True
    count = 20_000
    penalized = [seen] * count if params.repetition_penalty != 1 else []
    sampled = _draw(params, logits, count, seen=penalized)
    expected = _reference(params, logits[0], [1, 3])
    torch.testing.assert_close(sampled.logprobs, expected[sampled.ids], atol=2e-5, rtol=0)
    full = (logits[0] / params.temperature).log_softmax(-1)
    torch.testing.assert_close(sampled.full_logprobs, full[sampled.ids], atol=2e-5, rtol=0)
    shares = torch.bincount(sampled.ids, minlength=vocabulary) / count
    error = (expected.exp() * (1 - expected.exp()) / count).sqrt()
    assert ((shares - expected.exp()).abs() <= 5 * error + 2 / count).all()


TRUNCATIONS: list[dict[str, Any]] = [
    {"top_p": 0.6, "min_p": 0.3},
    {"top_p": 0.7, "min_p": 0.4},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"top_k": 7},
    {"top_k": 500},
]


def _kept_by_sampler(logits: torch.Tensor, params: SamplingParams, candidates: int) -> torch.Tensor:
    """Return bool [R, V]: the tokens that the sampler keeps if every row has these parameters."""
    limits = [params.top_k or math.inf, params.top_p if params.top_p < 1 else math.inf, params.min_p]
    probabilities = logits.softmax(-1)
    rows = torch.tensor([limits] * len(logits), dtype=torch.float64)
    smallest = min_kept_prob(probabilities, rows, max(candidates, params.top_k))
    return (probabilities >= smallest) & (probabilities > 0)


def _kept_in_float64(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that truncation in float64 keeps, and the distance to the nearest threshold.

    The order is Hugging Face's: top_k, top_p of the remaining mass, min_p.

    Returns:
        Kept tokens, bool [R, V], and for each row the distance [R] of the nearest token from a threshold, as a
        probability or in nats.
    """
    ranked = logits.double().sort(-1, descending=True).values[:, : params.top_k or None]
    shares = ranked.softmax(-1)
    before = shares.cumsum(-1) - shares
    min_p_threshold = ranked[:, :1] + (math.log(params.min_p) if params.min_p else -math.inf)
    kept = (before < params.top_p) & (ranked >= min_p_threshold)
    near = torch.minimum((before - params.top_p).abs().amin(-1), (ranked - min_p_threshold).abs().amin(-1))
    return logits >= ranked.gather(1, kept.sum(-1, keepdim=True) - 1), near


@pytest.mark.parametrize("candidates", [4, 320])
@pytest.mark.parametrize("scale", [0.5, 1.5, 3.0])
@pytest.mark.parametrize("options", TRUNCATIONS, ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()))
def test_kept_tokens_match_float64_except_at_threshold(options: dict[str, Any], scale: float, candidates: int):
    params = SamplingParams(1, **options)
    logits = torch.randn(4000, 320, generator=torch.Generator().manual_seed(5)) * scale
    kept = _kept_by_sampler(logits, params, candidates)
    expected, near = _kept_in_float64(logits, params)
    differs = (kept != expected).any(-1)
    assert (near[differs] < 1e-6).all(), "float32 rounds running sums that much"
    assert differs.sum() <= len(logits) // 500


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_p": 0.25}, 1),  # the most likely token has 1/4 and reaches the threshold by itself
        ({"top_p": 0.26}, 5),  # the next four tokens are tied at 1/8, and all of them are kept
        ({"top_p": 0.75}, 5),
        ({"top_p": 0.7500001}, 37),
        ({"top_p": 1 - 1e-9}, 37),
        ({"top_k": 1}, 1),
        ({"top_k": 2}, 5),
        ({"top_k": 6}, 37),
        ({"top_k": 5, "top_p": 0.3}, 1),  # 1/4 is 1/3 of the mass 3/4 that top_k leaves
        ({"top_k": 5, "top_p": 0.34}, 5),
        ({"min_p": 0.5}, 5),
        ({"min_p": 0.51}, 1),
        ({"min_p": 0.01}, 37),
    ],
)
@pytest.mark.parametrize("candidates", [1, 3, 64])
def test_ties_with_last_kept_token_are_kept(options, kept, candidates):
    probabilities = torch.tensor([1 / 4] + [1 / 8] * 4 + [1 / 128] * 32 + [0.0] * 3)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    logits = probabilities[order].log().expand(6, -1)
    found = _kept_by_sampler(logits, SamplingParams(1, **options), candidates)
    assert torch.equal(found, (torch.arange(40) < kept)[order].expand(6, -1))


def test_search_extends_beyond_insufficient_candidates():
    """A peaked row needs few candidates, and a flat row keeps nearly all of its tokens."""
    logits = torch.randn(2, 9000, generator=torch.Generator().manual_seed(2)) * torch.tensor([[9.0], [0.2]])
    params = SamplingParams(1, top_p=0.9)
    expected, _ = _kept_in_float64(logits, params)
    assert expected[0].sum() < 256 and expected[1].sum() > 4096
    assert torch.equal(_kept_by_sampler(logits, params, 256), expected)


@pytest.mark.parametrize("options", TRUNCATIONS, ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()))
def test_asynchronous_mask_samples_the_same_tokens(options: dict[str, Any]):
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(64, 700, generator=generator) * 2
    logits[:, ::50] = logits[:, :1]  # ties
    params = [SamplingParams(1, **options)] * 64
    synchronous, asynchronous = (RowSampler(params, range(64), [0] * 64, CPU, mask) for mask in (None, mask_by_sorting))
    for _ in range(3):
        expected, actual = synchronous(logits.clone()), asynchronous(logits.clone())
        assert torch.equal(expected.ids, actual.ids)
        # In one row with top_p=0.999 the results differ in a token exactly at the threshold.
        torch.testing.assert_close(expected.logprobs, actual.logprobs, rtol=0, atol=1e-4)


def test_untruncated_rows_are_unchanged_beside_truncated_rows():
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(4)).expand(300, -1)
    params = [SamplingParams(1, top_k=3) if row % 3 == 0 else SamplingParams(1) for row in range(300)]
    sampled = RowSampler(params, range(300), [0] * 300, CPU)(logits)
    free = torch.arange(300) % 3 > 0
    assert torch.equal(sampled.logprobs[free], sampled.full_logprobs[free])
    assert len(sampled.ids[free].unique()) > 100
    assert set(sampled.ids[~free].tolist()) == set(logits[0].topk(3).indices.tolist())
    expected_gain = -logits[0].softmax(-1).topk(3).values.sum().log()
    torch.testing.assert_close(sampled.logprobs[~free] - sampled.full_logprobs[~free], expected_gain.expand(100))


def test_greedy_takes_argmax_with_zero_logprob():
    logits = torch.randn(5, 40)
    sampled = RowSampler([SamplingParams(1, temperature=0.0)] * 5, [0] * 5, [0] * 5, CPU)(logits)
    assert torch.equal(sampled.ids, logits.argmax(-1))
    assert torch.equal(sampled.logprobs, torch.zeros(5))
    torch.testing.assert_close(sampled.full_logprobs, logits.log_softmax(-1).amax(-1))


def test_rows_keep_their_own_parameters():
    torch.manual_seed(0)
    logits = torch.randn(1, 30)
    params = [
        SamplingParams(1),
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, top_k=2),
        SamplingParams(1, temperature=0.3, top_p=0.5),
    ]
    together = RowSampler(params, [5] * 4, [3] * 4, CPU)(logits.expand(4, -1))
    for row, each in enumerate(params):
        single = RowSampler([each], [5], [3], CPU)(logits)
        assert together.ids[row] == single.ids[0]
        torch.testing.assert_close(together.logprobs[row], single.logprobs[0])


def test_forbidden_tokens_are_excluded_and_rest_renormalized():
    logits = torch.zeros(1, 4)
    sampled = _draw(SamplingParams(1), logits, 500, forbidden=[(row, torch.tensor([0, 2])) for row in range(500)])
    assert set(sampled.ids.tolist()) == {1, 3}
    torch.testing.assert_close(sampled.logprobs, torch.full((500,), -math.log(2)))
    torch.testing.assert_close(sampled.full_logprobs, torch.full((500,), -math.log(4)))


@pytest.mark.parametrize("count", [3, 512, 513, 2000, 151_936])
def test_inverse_cdf_matches_running_sum(count):
    torch.manual_seed(count)
    weights = torch.rand(64, count) * (torch.rand(64, count) < 0.1)
    weights[:, -1] += 1e-3
    random = torch.linspace(0, 1 - 2**-52, 64, dtype=torch.float64).unsqueeze(1)
    found = inverse_cdf(weights, random)
    exact = weights.double().cumsum(-1)
    expected = torch.searchsorted(exact, random * exact[:, -1:], right=True)
    below = torch.where(found > 0, exact.gather(1, (found - 1).clamp(min=0)), torch.zeros_like(random))
    assert (weights.gather(1, found) > 0).all()
    slack = 1e-6 * exact[:, -1:]
    assert (
        (found == expected)
        | ((below <= random * exact[:, -1:] + slack) & (exact.gather(1, found) >= random * exact[:, -1:] - slack))
    ).all()


def test_token_of_probability_zero_is_never_returned():
    for position in (0, 1, 2):
        weights = torch.zeros(2, 3)
        weights[:, position] = 1e-30
        assert inverse_cdf(weights, torch.tensor([[0.0], [1 - 2**-52]], dtype=torch.float64)).eq(position).all()


def test_random_numbers_are_uniform_and_deterministic():
    seeds, positions = np.arange(400, dtype=np.uint64).repeat(50), np.tile(np.arange(50, dtype=np.uint64), 400)
    values = torch.from_numpy(random_uniform(seeds, positions))
    assert values.min() >= 0 and values.max() < 1
    counts = values.histc(50, 0, 1)
    assert ((counts - 400) ** 2 / 400).sum() < 90  # chi-square, 49 degrees: p = 0.0003
    pairs = torch.stack((values.view(400, 50)[:, :-1].flatten(), values.view(400, 50)[:, 1:].flatten()))
    assert abs(torch.corrcoef(pairs)[0, 1]) < 0.03
    shuffled = np.random.default_rng(0).permutation(len(seeds))
    assert np.array_equal(random_uniform(seeds[shuffled], positions[shuffled]), values.numpy()[shuffled])
    assert np.array_equal(random_uniform(seeds[::50, None], positions[:50]).ravel(), values.numpy())


def test_random_numbers_match_unsigned_arithmetic():
    """Compute the numbers with Python integers modulo 2**64, as in the paper."""

    def mixed(bits: int) -> int:
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return bits ^ bits >> 31

    seeds = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, *(mixed(n) for n in range(200))]
    for position in (0, 5, 131_071):
        expected = [
            (mixed((mixed((seed + GOLDEN) % 2**64) + (position + 1) * GOLDEN) % 2**64) >> 12) * 2.0**-52
            for seed in seeds
        ]
        assert random_uniform(np.array(seeds, np.uint64), np.array([position], np.uint64)).tolist() == expected
    assert random_uniform(np.array([2**64 - 1], np.uint64), np.array([5], np.uint64)) == 0.15403342580516743


def test_sampler_continues_rows_at_their_positions():
    """The sampler runs for more steps than random numbers are generated together."""
    seeds, positions = [3, 2**64 - 1, 2**63], [0, 7, 1000]
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(1)] * 3
    sampler = RowSampler(params, seeds, positions, CPU)
    ids = torch.stack([sampler(logits).ids for _ in range(40)])
    fresh_ids = [RowSampler(params, seeds, [n + step for n in positions], CPU)(logits).ids for step in range(40)]
    assert torch.equal(ids, torch.stack(fresh_ids))
    assert len(ids.unique()) > 20


@pytest.mark.parametrize("options", TRUNCATIONS, ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()))
def test_tie_breaking_kernel_keeps_same_tokens(options: dict[str, Any]):
    """Like vLLM's kernel on accelerators, the mask keeps only as many tied tokens as requested."""

    def mask(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        ranked, order = logits.sort(dim=-1, descending=True, stable=True)
        ranked[torch.arange(logits.shape[1]) >= top_k.unsqueeze(1)] = -math.inf
        shares = ranked.double().softmax(-1)
        ranked[shares.cumsum(-1) - shares >= top_p.unsqueeze(1)] = -math.inf
        return logits.scatter_(1, order, ranked)

    logits = (torch.randn(400, 320, generator=torch.Generator().manual_seed(8)) * 4).round() / 4
    params = [SamplingParams(1, **options), SamplingParams(1), SamplingParams(1, temperature=0.0)] * 133
    rows = logits[: len(params)].clone()
    by_host, by_kernel = (
        RowSampler(params, range(399), [0] * 399, CPU, mask_function)(rows) for mask_function in (None, mask)
    )
    assert torch.equal(rows, logits[:399]), "the kernel writes into a copy"
    assert (by_host.ids != by_kernel.ids).sum() <= 1, "float32 rounds thresholds"
    same = by_host.ids == by_kernel.ids
    torch.testing.assert_close(by_host.logprobs[same], by_kernel.logprobs[same], atol=1e-6, rtol=0)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("count", [320, 1000])  # one block, and several blocks with an incomplete last one
def test_non_finite_logits_give_non_finite_logprob(value: float, count: int):
    found = RowSampler([SamplingParams(max_tokens=1)], [0], [0], CPU)(torch.full((1, count), value))
    assert 0 <= int(found.ids) < count
    assert not torch.isfinite(found.logprobs).any()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_top_tokens_are_those_of_the_full_distribution(temperature: float):
    torch.manual_seed(4)
    logits = torch.randn(4, 50)
    params = [SamplingParams(max_tokens=1, temperature=temperature, top_k=2)] * 4
    plain = RowSampler(params, range(4), [0] * 4, CPU)(logits)
    sampled = RowSampler(params, range(4), [0] * 4, CPU, top_logprobs=[0, 3, 0, 5])(logits)
    assert plain.top_ids is None and torch.equal(plain.ids, sampled.ids)
    assert torch.equal(plain.full_logprobs, sampled.full_logprobs)
    expected = (logits / (temperature or 1.0)).log_softmax(-1)[[1, 3]].topk(5)
    assert sampled.top_ids is not None and torch.equal(sampled.top_ids, expected.indices)
    torch.testing.assert_close(sampled.top_logprobs, expected.values, atol=1e-5, rtol=0)


class OperationLog(TorchDispatchMode):
    """Records each operation, and how many elements its largest tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        tensors = [value for value in (*args, result) if isinstance(value, torch.Tensor)]
        if function.is_view:
            return result
        self.operations.append((function.overloadpacket.__name__, max((t.numel() for t in tensors), default=0)))
        return result


def test_new_batch_reaches_an_accelerator_in_one_copy():
    params = [
        SamplingParams(1, temperature=0.7),
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, top_k=3, top_p=0.9),
        SamplingParams(1, repetition_penalty=1.1),
    ]
    with OperationLog() as log:
        RowSampler(params, range(4), [5] * 4, torch.device("meta"), mask_by_sorting, [0, 1, 0, 2])
    on_device = [name for name, _ in log.operations if name not in ("empty", "lift_fresh", "detach")]
    assert on_device == ["_to_copy"]


def test_packed_arrays_keep_values_and_dtypes():
    arrays = [np.arange(3.0), np.array([[True], [False], [True]]), np.arange(5), np.ones((2, 3), np.float32)[:, ::2]]
    for array, tensor in zip(arrays, unpack_arrays(pack_arrays(arrays), arrays), strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, ["_to_copy"]), (0.7, ["div"])])
def test_sampling_makes_few_passes_over_logits(temperature: float, expected: list[str]):
    rows, vocabulary = 4, 2000
    sampler = RowSampler([SamplingParams(1, temperature=temperature)] * rows, range(rows), [0] * rows, CPU)
    logits = torch.randn(rows, vocabulary).bfloat16()
    with OperationLog() as log:
        sampler(logits)
    passes = [name for name, size in log.operations if size >= rows * (vocabulary - 512) and name != "gather"]
    assert passes == [*expected, "_softmax", "amax", "amax", "sum"]


def test_forbidden_tokens_of_many_rows_cost_few_operations():
    rows = 50
    forbidden = [(row, torch.tensor([row, row + 1])) for row in range(rows)]
    forbidden.append((3, torch.arange(60) > 5))
    logits = torch.randn(rows, 60, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    for row, ids in forbidden:
        expected[row, ids] = -math.inf
    params = [SamplingParams(1)] * rows
    with OperationLog() as log:
        sampled = RowSampler(params, range(rows), [0] * rows, CPU)(logits, forbidden=forbidden)
    assert sum(name == "index_put_" for name, _ in log.operations) == 2
    plain = RowSampler(params, range(rows), [0] * rows, CPU)(expected)
    assert torch.equal(sampled.ids, plain.ids)
    assert torch.equal(sampled.logprobs, plain.logprobs)
