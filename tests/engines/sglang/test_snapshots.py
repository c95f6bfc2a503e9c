"""The states that SGLang's prefix cache keeps at chunk boundaries (`--mamba-radix-cache-strategy extra_buffer`)."""

from __future__ import annotations

from collections.abc import Callable

from tests.engines.sglang.harness import GREEDY


def test_a_repeated_prompt_starts_from_a_snapshot(engine: Callable, oracle: Callable, prompts: Callable) -> None:
    """Snapshots are taken inside a prefill (64 of 70 tokens, 128 of 130) and in decode, every 128 tokens here."""
    asked, expected = prompts("k3-deep")
    arguments = {
        "model_path": str(oracle("k3-deep").folder),
        "mamba_radix_cache_strategy": "extra_buffer",
        "mamba_track_interval": 128,
    }
    with engine(**arguments) as driver:
        long, tokens = max(zip(asked, expected, strict=True), key=lambda pair: len(pair[0]))
        assert len(long) == 130
        first = answer(driver, long, 140)
        assert first["output_ids"][:8] == tokens
        assert first["meta_info"]["cached_tokens"] == 0
        again = answer(driver, long, 8)
        assert again["output_ids"] == tokens
        assert again["meta_info"]["cached_tokens"] == 128, "cut inside the prefill"
        grown = long + first["output_ids"][:136]
        (fresh,) = driver.greedy([[*grown[:-1], grown[-1]]])
        continued = answer(driver, grown, 4)
        assert continued["output_ids"] == first["output_ids"][136:140] == fresh[:4]
        assert continued["meta_info"]["cached_tokens"] >= 256, "taken in decode"
        # One batch in which some rows are cut, some end on a boundary, and some are too short for a snapshot.
        mixed = [long[:n] for n in (3, 64, 70, 128, 129)]
        alone = [driver.greedy([prompt])[0] for prompt in mixed]
        driver("call", name="flush_cache")
        assert driver.greedy(mixed) == alone
        assert driver.greedy(mixed) == alone


def answer(driver: Callable, prompt: list[int], count: int) -> dict:
    request = {"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": count}}
    (result,) = driver.generate([request])  # type: ignore[attr-defined]
    return result


def test_hidden_states_are_tapped_after_the_named_layers(engine: Callable, oracle: Callable, prompts: Callable) -> None:
    """What speculative decoding asks of a target, here without a draft model: SGLang returns the taps."""
    import torch

    from kimi_k3_npu.model.attention import CachedAttention
    from kimi_k3_npu.model.causal_lm import empty_bank

    asked, _ = prompts("k3")
    prompt, layers = asked[0], [3, 8]
    arguments = {
        "model_path": str(oracle("k3").folder),
        "speculative_algorithm": "DSPARK",
        "enable_return_aux_hidden_states": True,
        "return_aux_hidden_state_layer_ids": layers,
        "disable_radix_cache": True,
    }
    with engine(**arguments) as driver:
        (result,) = driver.generate(
            [{"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": 1}, "return_hidden_states": True}]
        )
    model, taps = oracle("k3").model, []
    ids = torch.tensor(prompt)
    cache = model.new_cache(1, len(prompt))
    attention = CachedAttention(cache, [cache.join()], [len(prompt)])
    with torch.inference_mode():
        prefix = model.embed(ids, [len(ids)])

        def tap(layer: int, prefix: torch.Tensor, bank: torch.Tensor) -> None:
            if layer in layers:
                taps.append(model.read_after(layer, prefix, bank))

        model.run_layers(prefix, empty_bank(prefix), attention, [len(ids)], tap)
    print(
        result["meta_info"].keys(),
        result["meta_info"].get("hidden_states") and len(result["meta_info"]["hidden_states"]),
    )
    found = torch.tensor(result["meta_info"]["hidden_states"][0])
    torch.testing.assert_close(found, torch.cat(taps, dim=-1), rtol=0, atol=1e-4)
