"""However tokens are spread over passes, batches and cache slots, a sequence's logits are those of one whole pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.cache import PAGE, ModelCache
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM

if TYPE_CHECKING:
    from tests.conftest import Oracle

#: As for the oracles: another split is another order of summation.
TOLERANCE = 5e-4

NAMES = ("k3", "k3-deep", "kimi-linear")
FORMS = ({}, {"form": "absorbed", "kda_form": "recurrent"}, {"form": "expanded", "kda_form": "chunk"})


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=NAMES)
def model(oracle: Callable[[str], Oracle], request: pytest.FixtureRequest) -> KimiK3ForCausalLM:
    return oracle(request.param).model


@pytest.fixture
def k3(oracle: Callable[[str], Oracle]) -> KimiK3ForCausalLM:
    return oracle("k3").model


def random_ids(model: KimiK3ForCausalLM, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.text.vocab_size, (length,), generator=generator)


def step(
    model: KimiK3ForCausalLM, cache: ModelCache, slots: Sequence[int], parts: Sequence[Tensor], **forms: Any
) -> list[Tensor]:
    """One pass: `parts[i]` continues the sequence in `slots[i]`. Logits at each new token, per sequence."""
    lengths = [len(part) for part in parts]
    attention = CachedAttention(cache, slots, lengths, **forms)
    hidden = model(torch.cat([*parts, torch.empty(0, dtype=torch.long)]), attention)
    attention.commit()
    return list(model.logits(hidden).split(lengths))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("forms", FORMS, ids=["auto", "absorbed-recurrent", "expanded-chunk"])
@pytest.mark.parametrize("size", [1, 7, 64, 65])
def test_any_split_of_a_prefill_equals_the_whole(model: KimiK3ForCausalLM, size: int, forms: dict[str, str]) -> None:
    ids = random_ids(model, 140)
    cache = model.new_cache(1, len(ids))
    slot = cache.join()
    pieces = [step(model, cache, [slot], [part], **forms)[0] for part in ids.split(size)]
    assert cache.length(slot) == len(ids)
    assert_close(torch.cat(pieces), model.score([ids])[0])


def test_random_splits_equal_the_whole(model: KimiK3ForCausalLM) -> None:
    ids = random_ids(model, 140, seed=1)
    whole = model.score([ids])[0]
    for seed in range(5):
        borders = sorted(random.Random(seed).sample(range(1, len(ids)), 6))
        sizes = [end - start for start, end in zip([0, *borders], [*borders, len(ids)], strict=True)]
        cache = model.new_cache(1, len(ids))
        slot = cache.join()
        pieces = [step(model, cache, [slot], [part])[0] for part in ids.split(sizes)]
        assert_close(torch.cat(pieces), whole)


def test_a_batch_equals_each_alone(model: KimiK3ForCausalLM) -> None:
    prompts = [random_ids(model, length, seed=length) for length in (1, 64, 5, 129, 2)]
    for together, prompt in zip(model.score(prompts), prompts, strict=True):
        assert_close(together, model.score([prompt])[0])


def test_sequences_join_grow_by_different_numbers_and_leave(model: KimiK3ForCausalLM) -> None:
    """Eight sequences pass through three slots; a pass takes some of those present, in any order, by 0 to 30 tokens."""
    dice = random.Random(3)
    waiting = [random_ids(model, dice.randint(1, 70), seed=i) for i in range(8)]
    whole = {i: model.score([ids])[0] for i, ids in enumerate(waiting)}
    cache = model.new_cache(3, 70)
    present: dict[int, int] = {}  # sequence -> slot
    done = dict.fromkeys(range(len(waiting)), 0)
    to_come = list(range(len(waiting)))
    while to_come or present:
        while to_come and len(present) < 3:
            present[to_come.pop(0)] = cache.join()
        chosen = dice.sample(list(present), dice.randint(1, len(present)))
        grow = {i: min(dice.choice([0, 1, 1, 2, 30]), len(waiting[i]) - done[i]) for i in chosen}
        parts = [waiting[i][done[i] : done[i] + n] for i, n in grow.items()]
        logits = step(model, cache, [present[i] for i in chosen], parts)
        for i, got in zip(chosen, logits, strict=True):
            assert_close(got, whole[i][done[i] : done[i] + grow[i]])
            done[i] += grow[i]
            assert cache.length(present[i]) == done[i]
            if done[i] == len(waiting[i]):
                cache.leave(present.pop(i))


@pytest.mark.parametrize("lengths", [(90, 20), (20, 90)], ids=["shorter", "longer"])
def test_a_freed_slot_leaks_nothing(model: KimiK3ForCausalLM, lengths: tuple[int, int]) -> None:
    """Bit for bit: after A has left, B computes what it computes in a cache that A never was in."""
    a, b = (random_ids(model, length, seed=length) for length in lengths)

    def run(cache: ModelCache, ids: Tensor) -> Tensor:
        slot = cache.join()
        pieces = [step(model, cache, [slot], [part])[0] for part in ids.split(17)]
        cache.leave(slot)
        return torch.cat(pieces)

    used, fresh = model.new_cache(1, 100), model.new_cache(1, 100)
    run(used, a)
    for pool, empty in zip(used.pools(), fresh.pools(), strict=True):
        assert torch.equal(pool, empty)
    assert torch.equal(run(used, b), run(fresh, b))


@pytest.fixture
def poisoned(model: KimiK3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> int:
    """A token id whose row of the embedding is NaN."""
    table = model.embed_tokens.weight.clone()
    table[77] = float("nan")
    monkeypatch.setitem(model.embed_tokens._parameters, "weight", nn.Parameter(table, requires_grad=False))
    return 77


def test_a_nan_stays_in_its_sequence(model: KimiK3ForCausalLM, poisoned: int) -> None:
    """In prefill and while decoding, whichever place the poisoned sequence has in the batch."""

    def two_passes(prompts: Sequence[Tensor]) -> list[Tensor]:
        cache = model.new_cache(3, 80)
        slots = [cache.join() for _ in prompts]
        prefill = step(model, cache, slots, [ids[:-1] for ids in prompts])
        decode = step(model, cache, slots, [ids[-1:] for ids in prompts])
        return [torch.cat(logits) for logits in zip(prefill, decode, strict=True)]

    prompts = [random_ids(model, length, seed=length) % poisoned for length in (40, 9, 66)]
    healthy = two_passes(prompts)
    for place in range(3):
        sick = [*prompts]
        sick[place] = prompts[place].clone()
        sick[place][4] = poisoned
        for i, logits in enumerate(two_passes(sick)):
            if i == place:
                assert logits[4:].isnan().all()
            else:
                assert_close(logits, healthy[i], 1e-5)


def test_a_nan_leaves_with_its_sequence(model: KimiK3ForCausalLM, poisoned: int) -> None:
    """Not even a pass that was never committed leaves anything behind."""
    ids = random_ids(model, 30, seed=5) % poisoned
    expected = model.score([ids])[0]
    cache = model.new_cache(2, 40)
    neighbour, slot = cache.join(), cache.join()
    step(model, cache, [neighbour], [ids])
    model(torch.full((20,), poisoned), CachedAttention(cache, [slot], [20]))
    cache.leave(slot)
    slot = cache.join()
    step(model, cache, [slot], [ids[:3]])
    # decoding beside a longer sequence reads rows that this one has not written
    slots = sorted([neighbour, slot])
    logits = dict(zip(slots, step(model, cache, slots, [ids[3:4], ids[3:4]]), strict=True))
    assert_close(logits[slot], expected[3:4])


def test_an_empty_batch(model: KimiK3ForCausalLM) -> None:
    assert model.score([]) == []


@pytest.mark.parametrize("slots", [(), (1, 0)], ids=["no sequences", "sequences without tokens"])
@pytest.mark.parametrize("forms", FORMS, ids=["auto", "absorbed-recurrent", "expanded-chunk"])
def test_a_pass_over_no_tokens(model: KimiK3ForCausalLM, slots: tuple[int, ...], forms: dict[str, str]) -> None:
    """An idle rank still runs the model. It changes nothing."""
    cache = model.new_cache(2, 10)
    step(model, cache, [cache.join(), cache.join()], [random_ids(model, 4), random_ids(model, 6)])
    before = [pool.clone() for pool in cache.pools()]
    attention = CachedAttention(cache, slots, [0] * len(slots), **forms)
    hidden = model(torch.empty(0, dtype=torch.long), attention)
    attention.commit()
    assert hidden.shape == (0, model.config.text.hidden_size)
    assert model.logits(hidden).shape == (0, model.config.text.vocab_size)
    assert all(torch.equal(pool, old) for pool, old in zip(cache.pools(), before, strict=True))


def test_a_sequence_without_tokens_beside_others(model: KimiK3ForCausalLM) -> None:
    ids = random_ids(model, 80)
    whole = model.score([ids])[0]
    for sizes in ((0, 80, 0), (80, 0, 0), (0, 1, 0)):
        cache = model.new_cache(3, 80)
        slots = [cache.join() for _ in range(3)]
        logits = step(model, cache, slots, [ids[:size] for size in sizes])
        assert [len(part) for part in logits] == list(sizes)
        assert_close(torch.cat(logits), whole[: sum(sizes)])
        states = [cache.kda_pools(layer)[1] for layer in model.config.text.kda_layers]
        empty = [slot for slot, size in zip(slots, sizes, strict=True) if not size]
        assert not any(state[empty].any() for state in states)


def test_no_free_slot(k3: KimiK3ForCausalLM) -> None:
    cache = k3.new_cache(2, 10)
    first, _ = cache.join(), cache.join()
    with pytest.raises(ValueError, match="all 2 cache slots are taken; free one or make the cache with more slots"):
        cache.join()
    cache.leave(first)
    assert cache.join() == first


def test_a_sequence_that_outgrows_its_slot(k3: KimiK3ForCausalLM) -> None:
    cache = k3.new_cache(1, PAGE)
    slot = cache.join()
    ids = random_ids(k3, PAGE + 1)
    step(k3, cache, [slot], [ids[:PAGE]])
    wanted = (
        f"slot {slot} would reach {PAGE + 1} tokens, but a slot holds {PAGE}; make the cache with a larger max_tokens"
    )
    with pytest.raises(ValueError, match=wanted):
        step(k3, cache, [slot], [ids[PAGE:]])
    assert cache.length(slot) == PAGE


def test_an_uncommitted_pass_cannot_be_run_again_unseen(model: KimiK3ForCausalLM) -> None:
    """A KDA state is changed in place: the second pass would start from what the first left, with other logits."""
    ids = random_ids(model, 30)
    whole = model.score([ids])[0]
    cache = model.new_cache(2, 40)
    slots = sorted([cache.join(), cache.join()])
    step(model, cache, slots, [ids[:20], ids[:20]])
    abandoned = CachedAttention(cache, slots[1:], [10])
    model(ids[20:], abandoned)
    again = CachedAttention(cache, slots, [10, 10])
    with pytest.raises(ValueError, match="cache slot 1: an earlier pass began to change its KDA state and was never"):
        model(torch.cat([ids[20:], ids[20:]]), again)
    (logits,) = step(model, cache, slots[:1], [ids[20:]])  # the other sequence is not concerned
    assert_close(logits, whole[20:])
    cache.leave(1)
    (logits,) = step(model, cache, [cache.join()], [ids])
    assert_close(logits, whole)


def test_an_attention_serves_one_pass(model: KimiK3ForCausalLM) -> None:
    ids = random_ids(model, 8)
    cache = model.new_cache(1, 40)
    slot = cache.join()
    attention, late = CachedAttention(cache, [slot], [4]), CachedAttention(cache, [slot], [4])
    model(ids[:4], attention)
    with pytest.raises(ValueError, match="layer 0 has run in this pass already; a CachedAttention serves one pass"):
        model(ids[:4], attention)
    attention.commit()
    with pytest.raises(ValueError, match="cache slot 0 holds 4 tokens, but this pass was made when it held 0"):
        model(ids[4:], late)


def test_an_open_pass_goes_with_a_reordered_sequence(k3: KimiK3ForCausalLM) -> None:
    cache = k3.new_cache(2, 40)
    slots = sorted([cache.join(), cache.join()])
    k3(random_ids(k3, 4), CachedAttention(cache, slots[:1], [4]))
    cache.reorder([1, 0])
    step(k3, cache, slots[:1], [random_ids(k3, 4)])
    with pytest.raises(ValueError, match="cache slot 1: an earlier pass"):
        step(k3, cache, slots[1:], [random_ids(k3, 4)])


def test_growing_keeps_what_is_there(k3: KimiK3ForCausalLM) -> None:
    ids = random_ids(k3, PAGE + 20)
    cache = k3.new_cache(2, PAGE)
    cache.join()
    slot = cache.join()
    step(k3, cache, [slot], [ids[:PAGE]])
    states = [cache.kda_pools(layer)[1] for layer in k3.config.text.kda_layers]
    cache.grow(PAGE + 20)
    assert cache.capacity == 2 * PAGE
    assert all(now is cache.kda_pools(layer)[1] for layer, now in zip(k3.config.text.kda_layers, states, strict=True))
    (logits,) = step(k3, cache, [slot], [ids[PAGE:]])
    assert_close(logits, k3.score([ids])[0][PAGE:])


def test_reorder_lets_sequences_continue_as_copies(model: KimiK3ForCausalLM) -> None:
    """As in beam search: both go on from the one prefix that was kept."""
    first, second, end = random_ids(model, 20, seed=1), random_ids(model, 50, seed=2), random_ids(model, 6, seed=3)
    cache = model.new_cache(2, 80)
    slots = sorted([cache.join(), cache.join()])
    step(model, cache, slots, [first, second])
    cache.reorder([1, 1])
    assert [cache.length(slot) for slot in slots] == [50, 50]
    one, two = step(model, cache, slots, [end, end[:2]])
    whole = model.score([torch.cat([second, end])])[0][50:]
    assert_close(one, whole)
    assert_close(two, whole[:2])
    cache.reorder([1, 0])
    assert [cache.length(slot) for slot in slots] == [52, 56]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.empty(0, dtype=torch.long), r"prompt 1 has shape \[0\], expected token ids \[T\] with T >= 1"),
        (torch.zeros(2, 3, dtype=torch.long), r"prompt 1 has shape \[2, 3\]"),
        (torch.tensor([1.0]), "prompt 1 has dtype torch.float32, expected integer token ids"),
        (torch.tensor([5, 128]), r"prompt 1 holds token id 128, outside the vocabulary 0\.\.127"),
        (torch.tensor([5, -1]), "prompt 1 holds token id -1, outside"),
    ],
    ids=["empty", "2-D", "float", "too large", "negative"],
)
def test_prompts_that_are_refused(k3: KimiK3ForCausalLM, prompt: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        k3.score([torch.tensor([1]), prompt])
