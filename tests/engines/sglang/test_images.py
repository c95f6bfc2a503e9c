"""Images over the HTTP server: the tokens of the transformers path, and images that are no good."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engines.sglang.harness import ARGUMENTS, ORACLES, Server, as_options


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    levels = np.random.default_rng(width * height).integers(0, 256, (height, width, 4), np.uint8)
    return Image.fromarray(levels).convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def asking(*files: bytes) -> list[dict[str, Any]]:
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in files]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "Look: "}, *parts, {"type": "text", "text": "?"}]}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kimi_k3_npu.tiny import write_tiny

    folder = tmp_path_factory.mktemp("images") / "tiny"
    write_tiny(folder, storage="fp32")
    return folder


@pytest.fixture(
    scope="module", params=[{}, {"tp_size": 2, "mm_enable_dp_encoder": True}], ids=["one rank", "two ranks"]
)
def server(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With chunks shorter than the prompts, so that images lie across them. Two ranks share the images."""
    arguments = {
        **ARGUMENTS,
        "model_path": tiny,
        "skip_tokenizer_init": False,
        "context_length": 2048,
        "chunked_prefill_size": 128,
        "skip_server_warmup": True,
        **request.param,
    }
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if request.param else {}
    server = Server(tmp_path_factory.mktemp("server"), *as_options(arguments), **env)
    try:
        server.wait()
        yield server
    finally:
        server.close()


Answer = tuple[str, list[float]]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> Callable[[list[dict[str, Any]]], Answer]:
    """The 8 tokens that the transformers path continues a conversation with, and the log-probability of each."""
    import torch

    from kimi_k3_npu.engines.processing import KimiK3Processor
    from kimi_k3_npu.engines.transformers import KimiK3ForGeneration

    processor = KimiK3Processor.from_pretrained(tiny)
    model: Any = KimiK3ForGeneration.from_pretrained(tiny)

    def answer(messages: list[dict[str, Any]]) -> Answer:
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs = processor.apply_chat_template(messages, **options)
        output = model.generate(
            **inputs, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        likeliest = torch.stack(output.logits, dim=1).log_softmax(-1).max(-1).values
        return processor.tokenizer.decode(output.sequences[0, -8:]), likeliest[0].tolist()

    return answer


def ask(server: Server, messages: list[dict[str, Any]]) -> Any:
    return server.post(
        "/v1/chat/completions", model="tiny", messages=messages, max_tokens=8, temperature=0, logprobs=True
    )


def said(reply: Any) -> Answer:
    (choice,) = reply["choices"]
    return choice["message"]["content"], [token["logprob"] for token in choice["logprobs"]["content"]]


def same(one: Answer, other: Answer) -> bool:
    """Tokens, and log-probabilities to 1e-3: what an image changes in them is 10 times as much."""
    return one[0] == other[0] and one[1] == pytest.approx(other[1], abs=1e-3)


@pytest.mark.parametrize(
    "files",
    [
        [],
        [file_of(picture(100, 70))],
        [file_of(picture(200, 300)), file_of(picture(40, 30), "JPEG")],
        [file_of(picture(60, 60, "RGBA"))],
        [file_of(picture(1, 1))],
        [file_of(picture(20_000, 20))],
        [file_of(picture(100, 70).convert("CMYK"), "JPEG")],
    ],
    ids=["none", "one", "two", "transparent", "1x1", "wide", "cmyk"],
)
def test_same_tokens_as_in_transformers(server: Server, expected: Callable, files: list[bytes]) -> None:
    assert same(said(ask(server, asking(*files))), expected(asking(*files)))


def test_an_image_is_seen(server: Server) -> None:
    """Prompts that differ in nothing but pixels: the cache of prefixes must tell them apart."""
    replies = [ask(server, asking(file_of(image))) for image in (picture(100, 70), Image.new("RGB", (100, 70)))]
    assert [reply["usage"]["prompt_tokens_details"]["image_tokens"] for reply in replies] == [12, 12]
    one, other = map(said, replies)
    assert max(abs(a - b) for a, b in zip(one[1], other[1], strict=True)) > 1e-2
    assert same(said(ask(server, asking(file_of(picture(100, 70))))), one)


def test_a_second_turn(server: Server, expected: Callable) -> None:
    messages = asking(file_of(picture(100, 70)))
    messages += [{"role": "assistant", "content": "noise"}, {"role": "user", "content": "why?"}]
    assert same(said(ask(server, messages)), expected(messages))


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", "cannot identify image file"),
        (b"no image", "cannot identify image file"),
        (file_of(picture(100, 70))[:-9000], "image file is truncated"),
        (file_of(picture(9, 9), "GIF", save_all=True, append_images=[picture(9, 8)]), "has 2 frames"),
    ],
    ids=["empty", "no image", "truncated", "animated"],
)
def test_bad_images_are_refused(server: Server, data: bytes, wanted: str) -> None:
    reply = ask(server, asking(data))
    assert reply["code"] == 400, reply
    assert wanted in reply["message"]
    assert server.healthy()
    assert said(ask(server, [{"role": "user", "content": "hi"}]))


class TestWanted:
    def test_if_and_only_if_the_folder_has_what_it_needs(self, tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
        from kimi_k3_npu.engines.sglang.images import wanted

        assert wanted(str(tiny), None)
        assert wanted(str(tiny), True)
        assert not wanted(str(tiny), False)
        for name in ("k3", "k3-deep"):
            assert not wanted(str(ORACLES / name), None)
        assert not caplog.records
        assert not wanted(str(ORACLES / "k3-vision"), None)
        assert "has no preprocessor_config.json, which says how images are prepared" in caplog.text

    @pytest.mark.parametrize(
        ("path", "why"),
        [
            (ORACLES / "k3", "has no vision weights"),
            (ORACLES / "k3-vision", "has no preprocessor_config.json"),
        ],
    )
    def test_asked_in_vain(self, path: Any, why: str) -> None:
        from kimi_k3_npu.engines.sglang.images import wanted
        from kimi_k3_npu.errors import LaunchError

        with pytest.raises(LaunchError, match=f"--enable-multimodal .* {why}"):
            wanted(str(path), True)

    @pytest.mark.parametrize("asked", [None, True])
    def test_a_name_on_a_hub_that_cannot_be_had(self, asked: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """Images are not switched off in silence."""
        from huggingface_hub import constants

        from kimi_k3_npu.engines.sglang.images import wanted
        from kimi_k3_npu.errors import LaunchError

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(LaunchError, match="--model-path hub/name is not a folder on this machine, and cannot be"):
            wanted("hub/name", asked)
