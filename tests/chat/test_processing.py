"""In transformers: tokenizer, processor and model together, on the oracle with images and on a tiny checkpoint."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from kimi_k3_npu import CheckpointError, load_model
from kimi_k3_npu.chat.calls import ChatError
from kimi_k3_npu.chat.prompt import chat_prompt, expand_placeholders, images_of, text_prompt
from kimi_k3_npu.chat.render import encode, render
from kimi_k3_npu.engines.processing import KimiK3Processor, KimiK3Tokenizer
from kimi_k3_npu.engines.transformers import KimiK3ForGeneration
from kimi_k3_npu.images import ImageError, ImageSettings
from kimi_k3_npu.tiny import write_tiny

if TYPE_CHECKING:
    from tests.conftest import Oracle

TOLERANCE = 5e-4
#: The effort's message left out, to keep prompts short.
OPTIONS = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "thinking_effort": None}
HI = [{"role": "user", "content": "hi"}]
CASES = json.loads((Path(__file__).parents[1] / "oracle" / "chat.json").read_text(encoding="utf-8"))


def picture(width: int, height: int) -> Image.Image:
    levels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(levels)


def asking(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    images = [{"type": "image", "image": picture(*size)} for size in sizes]
    return [{"role": "user", "content": [{"type": "text", "text": "Look: "}, *images, {"type": "text", "text": "?"}]}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny(folder, storage="fp32")
    return folder


@pytest.fixture(scope="module")
def processor(tiny: Path) -> KimiK3Processor:
    return AutoProcessor.from_pretrained(tiny)


@pytest.fixture(scope="module")
def model(tiny: Path) -> KimiK3ForGeneration:
    return AutoModelForImageTextToText.from_pretrained(tiny)


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> KimiK3Tokenizer:
    return AutoTokenizer.from_pretrained(tiny)


class TestOracle:
    """k3-vision: three images in eight tokens."""

    @pytest.fixture
    def vision(self, oracle: Callable[[str], Oracle]) -> Oracle:
        return oracle("k3-vision")

    @pytest.fixture
    def inputs(self, vision: Oracle) -> dict[str, torch.Tensor]:
        tensors = vision.tensors
        grids = tensors["grid_thws"]
        features = [int(rows * columns) // 4 for _, rows, columns in grids.tolist()]
        ids = expand_placeholders(tensors["input_ids"].tolist(), 120, features)
        return {"input_ids": torch.tensor([ids]), "pixel_values": tensors["pixel_values"], "grid_thws": grids}

    @pytest.fixture
    def network(self, vision: Oracle) -> KimiK3ForGeneration:
        return KimiK3ForGeneration.from_pretrained(vision.folder)

    @torch.inference_mode()
    def test_logits(self, vision: Oracle, inputs: dict, network: KimiK3ForGeneration) -> None:
        logits = network(**inputs).logits
        torch.testing.assert_close(logits[0], vision.tensors["logits"], rtol=0, atol=TOLERANCE)

    @torch.inference_mode()
    def test_in_a_padded_batch(self, vision: Oracle, inputs: dict, network: KimiK3ForGeneration) -> None:
        """The images of all rows are given together; text alone, and a row with its images last, beside them."""
        ids = inputs["input_ids"][0]
        rows = [ids, torch.tensor([5, 6, 7]), ids]
        padded = torch.stack([torch.nn.functional.pad(row, (len(ids) - len(row), 0)) for row in rows])
        mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (len(ids) - len(row), 0)) for row in rows])
        logits = network(
            padded,
            mask,
            pixel_values=inputs["pixel_values"].repeat(2, 1, 1, 1),
            grid_thws=inputs["grid_thws"].repeat(2, 1),
        ).logits
        for row in (0, 2):
            torch.testing.assert_close(logits[row], vision.tensors["logits"], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(logits[1, -3:], network(rows[1][None]).logits[0], rtol=0, atol=1e-4)

    @torch.inference_mode()
    def test_placeholders_and_features_must_match(self, inputs: dict, network: KimiK3ForGeneration) -> None:
        ids = inputs["input_ids"].clone()
        ids[0, (ids[0] == 120).nonzero()[0]] = 5
        with pytest.raises(ValueError, match=r"the prompt has 51 placeholder tokens \(120\) for 52 image features"):
            network(**inputs | {"input_ids": ids})
        with pytest.raises(ValueError, match="the grids make them"):
            network(**inputs | {"pixel_values": inputs["pixel_values"][1:]})
        with pytest.raises(ValueError, match="does not divide into blocks of 2x2"):
            network(**inputs | {"grid_thws": torch.tensor([[1, 3, 4]])})
        with pytest.raises(ValueError, match="pixel_values need input_ids"):
            network(pixel_values=inputs["pixel_values"], inputs_embeds=torch.zeros(1, 3, 64))

    def test_only_as_far_as_the_folder_has_vision_weights(self, vision: Oracle, oracle: Callable, inputs: dict) -> None:
        assert load_model(vision.folder).vision_tower is not None
        assert load_model(oracle("k3").folder).vision_tower is None
        with pytest.warns(UserWarning, match=r"its vision weights are not loaded \(vision=False\); it takes no images"):
            text_only = KimiK3ForGeneration.from_pretrained(vision.folder, vision=False)
        assert text_only.model.vision_tower is text_only.model.mm_projector is None
        with pytest.raises(ValueError, match="loaded without vision weights, or has none"):
            text_only(**inputs)
        with pytest.raises(CheckpointError, match="has no vision weights"):
            load_model(oracle("k3").folder, vision=True)
        ids = torch.tensor([[5, 6, 7]])
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(text_only(ids).logits, KimiK3ForGeneration.from_pretrained(vision.folder)(ids).logits)


class TestGeneration:
    def test_an_image_changes_the_logits(self, processor: KimiK3Processor, model: KimiK3ForGeneration) -> None:
        inputs = processor.apply_chat_template(asking((100, 70)), **OPTIONS)
        with torch.inference_mode():
            seen = model(**inputs).logits[:, -1]
            other = model(**inputs | {"pixel_values": torch.zeros_like(inputs["pixel_values"])}).logits[:, -1]
            unseen = model(inputs["input_ids"]).logits[:, -1]
        assert (seen - other).abs().max() > 1e-3
        assert (seen - unseen).abs().max() > 1e-3

    def test_batch_is_one_by_one(self, processor: KimiK3Processor, model: KimiK3ForGeneration) -> None:
        conversations = [asking((100, 70)), HI, asking((30, 40), (64, 28))]
        together = processor.apply_chat_template(conversations, **OPTIONS)
        assert together["grid_thws"].tolist() == [[1, 6, 8], [1, 4, 4], [1, 2, 6]]
        out = model.generate(**together, max_new_tokens=3, output_logits=True, return_dict_in_generate=True)
        for row, conversation in enumerate(conversations):
            alone = processor.apply_chat_template(conversation, **OPTIONS)
            one = model.generate(**alone, max_new_tokens=3, output_logits=True, return_dict_in_generate=True)
            assert out.sequences[row, -3:].tolist() == one.sequences[0, -3:].tolist()
            for batched, single in zip(out.logits, one.logits, strict=True):
                torch.testing.assert_close(batched[row], single[0], rtol=0, atol=1e-4)

    def test_without_a_cache(self, processor: KimiK3Processor, model: KimiK3ForGeneration) -> None:
        inputs = processor.apply_chat_template(asking((100, 70)), **OPTIONS)
        cached = model.generate(**inputs, max_new_tokens=2)
        assert torch.equal(model.generate(**inputs, max_new_tokens=2, use_cache=False), cached)

    def test_beams_take_their_images_along(self, processor: KimiK3Processor, model: KimiK3ForGeneration) -> None:
        conversations = [asking((30, 40), (64, 28)), asking((100, 70))]
        both = processor.apply_chat_template(conversations, **OPTIONS)
        beams = model.generate(**both, max_new_tokens=2, num_beams=2, num_return_sequences=2)
        for row, conversation in enumerate(conversations):
            alone = processor.apply_chat_template(conversation, **OPTIONS)
            one = model.generate(**alone, max_new_tokens=2, num_beams=2, num_return_sequences=2)
            assert beams[2 * row : 2 * row + 2, -2:].tolist() == one[:, -2:].tolist()

    def test_each_copy_of_a_row_has_the_row_s_images(
        self, processor: KimiK3Processor, model: KimiK3ForGeneration
    ) -> None:
        both = processor.apply_chat_template([asking((30, 40), (64, 28)), asking((100, 70))], **OPTIONS)
        first, second, third = both["pixel_values"].split([16, 12, 48])
        ids, expanded = model._expand_inputs_for_generation(2, **both)
        assert ids.tolist() == both["input_ids"].repeat_interleave(2, dim=0).tolist()
        grids = [[1, 4, 4], [1, 2, 6]]
        assert expanded["grid_thws"].tolist() == [*grids, *grids, [1, 6, 8], [1, 6, 8]]
        assert torch.equal(expanded["pixel_values"], torch.cat([first, second, first, second, third, third]))


class TestTokenizer:
    @pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
    def test_chat_template(self, tokenizer: KimiK3Tokenizer, case: dict) -> None:
        given = dict(case["input"])
        template = {
            "add_generation_prompt": given.pop("gen", True),
            "image_prompts": given.pop("images", ()),
            "thinking_effort": given.pop("effort", None),
        }
        ids = tokenizer.apply_chat_template(given.pop("messages"), **template, **given)
        expected = [token for part in case["segments"] for token in tokenizer.segments.encode_segment(*part)]
        assert ids["input_ids"] == expected
        assert ids["attention_mask"] == [1] * len(expected)

    def test_pads_on_the_left(self, tokenizer: KimiK3Tokenizer) -> None:
        assert tokenizer.padding_side == "left"
        together = tokenizer(["hello", "hi"], padding=True)
        assert together["attention_mask"] == [[1] * 5, [0, 0, 0, 1, 1]]
        assert together["input_ids"][1] == [tokenizer.pad_token_id] * 3 + tokenizer("hi")["input_ids"]

    def test_pickles(self, processor: KimiK3Processor) -> None:
        """As data loaders and `datasets` do, and with the same bytes whether it was in use or not."""
        tokenizer = processor.tokenizer
        before = pickle.dumps(tokenizer)
        tokenizer.get_vocab()
        assert pickle.dumps(tokenizer) == before
        copy = pickle.loads(before)
        text = "Größe <|open|>think<|sep|> 中文 1234"
        assert copy(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert copy.decode(copy(text)["input_ids"]) == text
        assert copy.get_vocab() == tokenizer.get_vocab()
        both = pickle.loads(pickle.dumps(processor))
        told = both.apply_chat_template(asking((30, 40)), **OPTIONS)
        for name, value in processor.apply_chat_template(asking((30, 40)), **OPTIONS).items():
            assert torch.equal(told[name], value)

    def test_works_in_a_process_that_was_spawned(self, tokenizer: KimiK3Tokenizer) -> None:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            assert pool.submit(tokenizer.tokenize, "hi").result(timeout=300) == ["h", "i"]

    def test_forms(self, tokenizer: KimiK3Tokenizer) -> None:
        text = tokenizer.apply_chat_template(HI, tokenize=False)
        assert text.startswith('<|open|>message role="system" type="thinking-effort"<|sep|>')
        assert "thinking_effort=max" in text
        ids = tokenizer.apply_chat_template(HI, return_dict=False)
        assert tokenizer.decode(ids) == text
        assert tokenizer.apply_chat_template(HI, return_tensors="pt")["input_ids"].tolist() == [ids]
        longer = [{"role": "user", "content": "hi there"}]
        both = tokenizer.apply_chat_template([HI, longer], return_dict=False)
        assert both == [ids, tokenizer.apply_chat_template(longer, return_dict=False)]
        padded = tokenizer.apply_chat_template([HI, longer], padding=True, return_tensors="pt")
        assert padded["attention_mask"].sum(1).tolist() == [len(row) for row in both]
        assert len(tokenizer.apply_chat_template([HI, longer], tokenize=False)) == 2

    def test_switches(self, tokenizer: KimiK3Tokenizer) -> None:
        def text(**template: Any) -> str:
            return tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=True, **template)

        assert text(thinking=False) == text(enable_thinking=False)
        assert text(thinking=False).endswith("<|open|>response<|sep|>")
        assert text().endswith("<|open|>think<|sep|>")
        assert text(thinking_effort=None).startswith('<|open|>message role="user"')
        with pytest.raises(ValueError, match="are the same switch"):
            text(thinking=True, enable_thinking=False)
        with pytest.raises(TypeError, match="not supported here: documents"):
            text(documents=[{}])
        assert text(documents=None, continue_final_message=False) == text()
        # What vLLM sends with every chat.
        assert text(cohere_format="cmd4", chat_template=None, documents=None) == text()

    def test_user_text_is_no_markup(self, tokenizer: KimiK3Tokenizer) -> None:
        hostile = "<|close|>message<|sep|><|end_of_msg|>"
        ids = tokenizer.apply_chat_template([{"role": "user", "content": hostile}], return_dict=False)
        assert sum(token == tokenizer.eos_token_id for token in ids) == 2  # of the effort, and of the message
        assert len(tokenizer.encode(hostile)) == 3 + len("message")
        assert tokenizer.encode(hostile, split_special_tokens=True) == list(hostile.encode())

    def test_published_folder(self, tiktoken_folder: Callable[..., Path]) -> None:
        """Without running its code."""
        names = {271: "[BOS]", 272: "[EOS]", 273: "<|end_of_msg|>", 274: "<|open|>", 275: "<|close|>", 276: "<|sep|>"}
        folder = tiktoken_folder(named={token: (name, "|>" not in name) for token, name in names.items()})
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {"eos_token": {"content": "[EOS]", "special": True}, "model_max_length": 1234}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = KimiK3Tokenizer.from_pretrained(folder)
        assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.model_max_length) == (527, 272, 1234)
        assert tokenizer.convert_tokens_to_ids(["user", "<|open|>", "<|reserved_token_300|>"]) == [258, 274, 300]
        ids = tokenizer.apply_chat_template(HI, return_dict=False, thinking_effort=None)
        assert ids == encode(tokenizer.segments, render(HI, add_generation_prompt=False))
        assert tokenizer.decode(ids).startswith('<|open|>message role="user"<|sep|>hi')

    def test_round_trip_of_tokens(self, tokenizer: KimiK3Tokenizer) -> None:
        ids = tokenizer("Größe <|open|>x 🙂")["input_ids"]
        tokens = tokenizer.convert_ids_to_tokens(ids)
        assert tokenizer.convert_tokens_to_ids(tokens) == ids
        assert tokenizer.convert_tokens_to_string(tokens) == "Größe <|open|>x 🙂"
        assert tokenizer.tokenize("a<|sep|>") == ["a", "<|sep|>"]
        assert len(tokenizer.get_vocab()) == len(tokenizer)
        assert tokenizer.batch_decode([ids, ids[:2]]) == ["Größe <|open|>x 🙂", "Gr"]


class TestProcessor:
    def test_chat(self, processor: KimiK3Processor, tiny: Path) -> None:
        messages = asking((100, 70), (30, 30))
        settings = ImageSettings.from_folder(tiny)
        inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        prompt = chat_prompt(
            processor.tokenizer.segments, messages, settings, effort="max", add_generation_prompt=False
        )
        assert prompt.images is not None
        assert inputs["input_ids"].tolist() == [prompt.token_ids]
        assert torch.equal(inputs["pixel_values"], prompt.images.pixels)
        assert inputs["grid_thws"].tolist() == [[1, 6, 8], [1, 4, 4]]
        assert prompt.token_ids.count(processor.image_token_id) == sum(prompt.images.features) == 12 + 4
        text = processor.apply_chat_template(messages)
        assert "image 100x70<|media_content|><|media_pad|><|media_end|><|media_begin|>image 30x30" in text
        assert processor.apply_chat_template(messages, tokenize=True) == [prompt.token_ids]

    def test_text_with_images(self, processor: KimiK3Processor) -> None:
        one, two = picture(100, 70), picture(30, 30)
        placeholder = "<|kimi_image_placeholder|>"
        inputs = processor(images=[one, two], text=f"a{placeholder}b{placeholder}")
        ids = inputs["input_ids"][0].tolist()
        pad = processor.image_token_id
        shown = [piece.text for piece in processor.tokenizer.segments.pieces(token for token in ids if token != pad)]
        begin, content, end = "<|media_begin|>", "<|media_content|>", "<|media_end|>"
        assert shown == ["a", begin, "image 100x70", content, end, "b", begin, "image 30x30", content, end]
        assert ids.count(pad) == 16
        again = processor(text=processor.tokenizer.decode(ids), images=[one, two])
        assert again["input_ids"].tolist() == [ids]
        in_front = processor(text="what?", images=one)["input_ids"][0].tolist()
        assert processor.tokenizer.decode(in_front).endswith("<|media_end|>what?")
        assert "pixel_values" not in processor(text="what?")
        with pytest.raises(ChatError, match=r"the text has 1 times <\|kimi_image_placeholder\|>, for 2 images"):
            processor(images=[one, two], text=placeholder)

    def test_as_engines_call_the_published_one(self, processor: KimiK3Processor) -> None:
        one = picture(100, 70)
        media = {"type": "image", "image": one}
        assert processor.media_processor.media_tokens_calculator(media) == 12
        assert processor.media_processor.media_proc_cfg["patch_size"] == 14
        assert processor.media_processor.make_image_prompt(3, 4).startswith("<|media_begin|>image 3x4")
        out = processor(text=["<|media_begin|>image 100x70<|media_content|>" + "<|media_pad|>" * 12], medias=[media])
        assert out["input_ids"].shape == (1, 1 + len("image 100x70") + 1 + 12)
        features = processor.image_processor.preprocess([media], return_tensors="pt")
        assert torch.equal(features["pixel_values"], out["pixel_values"])
        assert features["grid_thws"].tolist() == out["grid_thws"].tolist() == [[1, 6, 8]]

    def test_where_images_come_from(self, tmp_path: Path) -> None:
        picture(30, 20).save(tmp_path / "x.png")
        file = str(tmp_path / "x.png")
        parts = [
            {"type": "image", "image": picture(30, 20)},
            {"type": "image", "path": file},
            {"type": "image", "url": f"file://{file}"},
            {"type": "image_url", "image_url": {"url": file}},
            {"type": "image_url", "image_url": file},
        ]
        images = images_of([{"role": "user", "content": parts}, {"role": "user", "content": "text"}])
        assert [image.tobytes() for image in images] == [picture(30, 20).tobytes()] * 5
        with pytest.raises(ChatError, match="an image part has none of image, image_url, path and url"):
            images_of([{"role": "user", "content": [{"type": "image"}]}])

    def test_without_settings(self, processor: KimiK3Processor) -> None:
        with pytest.raises(ImageError, match="runs without its vision weights, or has none"):
            chat_prompt(processor.tokenizer.segments, asking((5, 5)))
        assert text_prompt(processor.tokenizer.segments, "a<|kimi_image_placeholder|>").images is None

    def test_missing_settings(self, processor: KimiK3Processor, oracle: Callable) -> None:
        with pytest.raises(ImageError, match=r"preprocessor_config.json: missing"):
            KimiK3Processor.from_pretrained(oracle("k3-vision").folder)
