"""The model behind transformers' interface: padding wherever it is, and every argument used or refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from kimi_k3_npu import load_model
from kimi_k3_npu.engines.transformers import GenerationCache, KimiK3ForGeneration
from kimi_k3_npu.errors import KimiK3Error
from kimi_k3_npu.model.fixed import decode_step

if TYPE_CHECKING:
    from tests.conftest import Oracle

TOLERANCE = 1e-4
PAD = 0


@pytest.fixture(scope="module")
def published(oracle: Callable[[str], Oracle]) -> Oracle:
    return oracle("k3")


@pytest.fixture(scope="module")
def network(published: Oracle) -> Any:
    return KimiK3ForGeneration.from_pretrained(published.folder)


def greedy(network: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """The new tokens, [B, 8]."""
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False} | options
    return network.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :]


def padded(prompts: list[Tensor], places: Callable[[int, int], slice | Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts with columns of padding, which `places(tokens, columns)` leaves out, and their mask: [B, L] each."""
    columns = max(map(len, prompts)) + 2
    ids = torch.full((len(prompts), columns), PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        where = places(len(prompt), columns)
        ids[row, where], mask[row, where] = prompt, 1
    return ids, mask


PLACES = {
    "left": lambda n, columns: slice(columns - n, columns),
    "right": lambda n, columns: slice(0, n),
    "both": lambda n, columns: slice(1, n + 1),
    "holes": lambda n, columns: torch.tensor([0, *range(2, n + 1)]),
}


class TestPadding:
    @pytest.mark.parametrize("use_cache", [True, False])
    @pytest.mark.parametrize("side", PLACES)
    def test_generates_the_published_tokens(self, published: Oracle, network: Any, side: str, use_cache: bool) -> None:
        ids, mask = padded(published.expected.prompts, PLACES[side])
        new = greedy(network, ids, mask, use_cache=use_cache)
        assert torch.equal(new, torch.stack(published.expected.greedy8))

    def test_on_the_right_without_a_mask_by_the_pad_token(self, network: Any) -> None:
        ids = torch.tensor([[5, 6, 7, PAD], [5, 6, 7, 8]])
        assert torch.equal(greedy(network, ids, pad_token_id=PAD)[:1], greedy(network, ids[:1, :3]))

    def test_compiled(self, published: Oracle) -> None:
        network: Any = KimiK3ForGeneration.from_pretrained(published.folder)
        network._decode_step = decode_step
        ids, mask = padded(published.expected.prompts, PLACES["right"])
        assert torch.equal(greedy(network, ids, mask), torch.stack(published.expected.greedy8))

    def test_beams(self, network: Any) -> None:
        ids = torch.tensor([[5, 6, 7, PAD], [5, 6, 7, 8]])
        mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
        beams = {"num_beams": 3, "num_return_sequences": 2}
        assert torch.equal(greedy(network, ids, mask, **beams)[:2], greedy(network, ids[:1, :3], **beams))

    @torch.inference_mode()
    def test_the_last_logits_are_each_row_s_own(self, network: Any) -> None:
        ids, mask = torch.tensor([[5, 6, PAD], [5, 6, 7]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
        every = network(ids, attention_mask=mask).logits
        assert not every[0, 2].any()
        last = network(ids, attention_mask=mask, logits_to_keep=3).logits
        torch.testing.assert_close(last[0], torch.cat([torch.zeros(1, 128), every[0, :2]]), rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(last[1], every[1], rtol=0, atol=TOLERANCE)

    @pytest.mark.parametrize(
        ("mask", "message"),
        [
            ([[1, 1, 1, 1]] * 2, r"attention_mask is \[2, 4\], expected \[2, 3\]: 0 columns seen before"),
            ([[0.0, -1e9, 0.0]] * 2, "attention_mask holds other values than 1 for a token and 0 for none"),
            ([[1, 2, 1]] * 2, "attention_mask holds other values than 1"),
        ],
    )
    def test_masks_that_are_refused(self, network: Any, mask: list, message: str) -> None:
        ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
        with pytest.raises(ValueError, match=message):
            network(ids, attention_mask=torch.tensor(mask))

    def test_a_row_without_tokens(self, network: Any) -> None:
        wanted = "attention_mask marks no token in row 1; generation needs at least one to continue"
        with pytest.raises(KimiK3Error, match=wanted):
            greedy(network, torch.tensor([[5, 6], [PAD, PAD]]), torch.tensor([[1, 1], [0, 0]]))

    def test_a_mask_that_changes_what_was_seen(self, network: Any) -> None:
        first = network(torch.tensor([[5, 6, 7]]), use_cache=True)
        with pytest.raises(ValueError, match=r"has \[2\] tokens in the columns seen before, but \[3\] were seen"):
            network(torch.tensor([[8]]), torch.tensor([[0, 1, 1, 1]]), first.past_key_values)

    def test_prompts_in_chunks(self, published: Oracle, network: Any) -> None:
        ids, mask = padded(published.expected.prompts, PLACES["left"])
        assert torch.equal(greedy(network, ids, mask, prefill_chunk_size=4), torch.stack(published.expected.greedy8))
        ids, mask = padded(published.expected.prompts, PLACES["right"])
        with pytest.raises(KimiK3Error, match="prefill_chunk_size = 4 needs prompts padded on the left"):
            greedy(network, ids, mask, prefill_chunk_size=4)


class TestArguments:
    IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])

    def test_labels_give_the_loss(self, network: Any) -> None:
        """The mean over the tokens after the first; -100 leaves one out."""
        labels = self.IDS.clone()
        labels[1, 2] = -100
        output = network(self.IDS, labels=labels)
        every = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), self.IDS[:, 1:].flatten(), reduction="none")
        wanted = every[[0, 1, 2, 3, 5]].sum()
        torch.testing.assert_close(output.loss, wanted / 5)
        torch.testing.assert_close(network(self.IDS, labels=labels, num_items_in_batch=2).loss, wanted / 2)
        assert network(self.IDS).loss is None

    def test_padding_has_no_part_in_the_loss(self, network: Any) -> None:
        alone = network(self.IDS[:1, :3], labels=self.IDS[:1, :3]).loss
        for row, mask in (([5, 6, 7, 8], [1, 1, 1, 0]), ([9, 5, 6, 7], [0, 1, 1, 1]), ([5, 9, 6, 7], [1, 0, 1, 1])):
            ids = torch.tensor([row])
            torch.testing.assert_close(network(ids, torch.tensor([mask]), labels=ids).loss, alone)

    def test_labels_that_do_not_fit(self, network: Any) -> None:
        with pytest.raises(ValueError, match=r"labels are \[2, 3\], expected \[B, L\] = \[2, 4\]"):
            network(self.IDS, labels=self.IDS[:, 1:])
        with pytest.raises(ValueError, match="labels need the logits of all columns: logits_to_keep is 1, expected 0"):
            network(self.IDS, labels=self.IDS, logits_to_keep=1)

    def test_return_dict_and_use_cache(self, network: Any) -> None:
        (logits,) = network(self.IDS, return_dict=False, use_cache=False)
        assert torch.equal(logits, network(self.IDS, return_dict=True).logits)
        assert network(self.IDS, use_cache=False).past_key_values is None

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("output_hidden_states", True),
            ("output_attentions", True),
            ("position_ids", torch.zeros(2, 4)),
            ("cache_position", torch.arange(4)),
            ("input_idz", torch.zeros(2, 4)),
            ("lables", torch.zeros(2, 4)),
        ],
    )
    def test_what_forward_does_not_take(self, network: Any, name: str, value: Any) -> None:
        with pytest.raises(TypeError, match=f"forward does not take {name}"):
            network(self.IDS, **{name: value})

    def test_what_has_no_effect_may_be_said(self, network: Any) -> None:
        output = network(self.IDS, output_attentions=False, output_hidden_states=None, position_ids=None)
        assert torch.equal(output.logits, network(self.IDS).logits)

    def test_other_inputs_that_are_refused(self, network: Any) -> None:
        with pytest.raises(ValueError, match="past_key_values is a DynamicCache, expected what a pass of this model"):
            network(self.IDS, past_key_values=DynamicCache())
        with pytest.raises(ValueError, match="forward needs one of input_ids"):
            network(self.IDS, inputs_embeds=torch.zeros(2, 4, 64))
        with pytest.raises(ValueError, match=r"logits_to_keep is tensor\(.*expected how many of the last logits"):
            network(self.IDS, logits_to_keep=torch.tensor([1]))
        rows = network(self.IDS).past_key_values
        with pytest.raises(ValueError, match="past_key_values are of 2 rows, this batch has 1"):
            network(self.IDS[:1, :1], past_key_values=rows)


class TestGenerateOptions:
    @pytest.mark.parametrize(
        ("option", "value", "why"),
        [
            ("prompt_lookup_num_tokens", 3, "it takes tokens back, and a KDA state cannot forget any"),
            ("assistant_early_exit", 2, "it takes tokens back"),
            ("cache_implementation", "static", "this model keeps its own cache"),
            ("cache_implementation", "offloaded", "this model keeps its own cache"),
            ("cache_implementation", "paged", "this model keeps its own cache"),
            ("output_hidden_states", True, "what layers compute is not kept"),
            ("output_attentions", True, "attention weights are never formed"),
            ("use_mtp", True, "this model has no layers that predict further tokens"),
        ],
    )
    def test_refused_by_name(self, network: Any, option: str, value: Any, why: str) -> None:
        with pytest.raises(KimiK3Error, match=f"{option} is not supported: {why}"):
            greedy(network, torch.tensor([[5, 6, 7]]), **{option: value})

    def test_an_assistant(self, network: Any) -> None:
        with pytest.raises(KimiK3Error, match="assistant_model is not supported: it takes tokens back"):
            greedy(network, torch.tensor([[5, 6, 7]]), assistant_model=network)

    def test_in_a_generation_config(self, network: Any) -> None:
        config = GenerationConfig(max_new_tokens=2, prompt_lookup_num_tokens=3)
        with pytest.raises(KimiK3Error, match="prompt_lookup_num_tokens is not supported"):
            network.generate(torch.tensor([[5, 6, 7]]), config)

    def test_a_typo(self, network: Any) -> None:
        with pytest.raises(ValueError, match="max_new_token'"):
            greedy(network, torch.tensor([[5, 6, 7]]), max_new_token=3)

    @pytest.mark.parametrize(
        "options",
        [
            {"guidance_scale": 1.5},
            {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
            {"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
            {"do_sample": True, "top_k": 5, "typical_p": 0.9, "num_return_sequences": 2},
            {"do_sample": True, "num_beams": 2},
        ],
    )
    def test_others_work(self, network: Any, options: dict[str, Any]) -> None:
        settings = {"max_new_tokens": 3, "min_new_tokens": 3} | options
        output = network.generate(torch.tensor([[5, 6, 7], [8, 9, 10]]), **settings)
        assert getattr(output, "sequences", output).shape == (2 * options.get("num_return_sequences", 1), 6)


class TestCache:
    def test_room_is_not_reserved_at_once(self, published: Oracle) -> None:
        """What was asked for would be 8 GB and more."""
        cache = GenerationCache(published.model, 50_000_000)
        attention = cache.attend([3], 3)
        assert attention.cache.capacity == 4096
        assert GenerationCache(published.model, 300).attend([3], 3).cache.capacity == 384
        assert GenerationCache(published.model, 50_000_000).attend([5000], 5000).cache.capacity == 10_112

    @torch.inference_mode()
    def test_growing_changes_no_answer(self, published: Oracle, network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kimi_k3_npu.engines.generation.FIRST_ROOM", 1)
        ids = torch.arange(120)[None] % 128
        cache = GenerationCache(published.model, 1000)
        whole = network(torch.cat([ids, ids, ids], dim=1)).logits
        capacities = []
        for start in range(0, 360, 60):
            part = torch.cat([ids, ids, ids], dim=1)[:, start : start + 60]
            logits = network(part, past_key_values=cache).logits
            capacities.append(cache._cache.capacity)
            torch.testing.assert_close(logits, whole[:, start : start + 60], rtol=0, atol=5e-4)
        assert capacities == [128, 128, 384, 384, 384, 384]

    def test_a_retry_after_an_error_is_refused(self, network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The failed pass had changed the state, so the same pass again would be wrong."""
        cache = network(torch.tensor([[5, 6, 7]])).past_key_values
        with monkeypatch.context() as patch:
            patch.setattr(network.model, "logits", _out_of_memory)
            with pytest.raises(MemoryError):
                network(torch.tensor([[8]]), past_key_values=cache)
        assert cache.get_seq_length() == 3
        with pytest.raises(ValueError, match=r"cache slot 0: an earlier pass .* never committed; free the slot"):
            network(torch.tensor([[8]]), past_key_values=cache)
        monkeypatch.setattr(network, "_decode_step", decode_step)
        with pytest.raises(ValueError, match=r"cache slot 0: an earlier pass .* never committed"):
            network(torch.tensor([[8]]), past_key_values=cache)


def _out_of_memory(*_: Any) -> Tensor:
    raise MemoryError


class TestDtype:
    @pytest.mark.parametrize("value", ["auto", "float32", "torch.float32", torch.float32])
    def test_names_of_transformers(self, published: Oracle, value: Any) -> None:
        assert KimiK3ForGeneration.from_pretrained(published.folder, dtype=value).model.dtype == torch.float32

    def test_the_earlier_argument(self, published: Oracle) -> None:
        with pytest.warns(FutureWarning, match="torch_dtype is the earlier name of dtype"):
            network = KimiK3ForGeneration.from_pretrained(published.folder, torch_dtype="bfloat16")
        assert network.model.dtype == torch.bfloat16
        with pytest.warns(FutureWarning), pytest.raises(KimiK3Error, match="but torch_dtype is 'float32'; give one"):
            KimiK3ForGeneration.from_pretrained(published.folder, dtype="bfloat16", torch_dtype="float32")

    @pytest.mark.parametrize("value", ["int8", "Float32", "nn", "fp8", "", {"text_config": "float32"}, torch.int8, 7])
    def test_refused(self, published: Oracle, value: Any) -> None:
        with pytest.raises(KimiK3Error, match=r"^dtype is .*; supported: .*float32, .*bfloat16, .*float16$"):
            KimiK3ForGeneration.from_pretrained(published.folder, dtype=value)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.complex64, "float32", torch.float8_e4m3fn])
    def test_load_model(self, published: Oracle, dtype: Any) -> None:
        """Integers would round every weight to one of a few."""
        wanted = f"dtype is {dtype!r}; supported: torch.float32, torch.bfloat16, torch.float16"
        with pytest.raises(KimiK3Error, match=wanted):
            load_model(published.folder, dtype=dtype)
