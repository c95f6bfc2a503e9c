"""The model class that SGLang builds, loads and runs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kimi_k3_npu import envs
from kimi_k3_npu.engines import weights
from kimi_k3_npu.engines.sglang import checkpoint, images, options
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.engines.sglang.attention import Ascend, EngineAttention
from kimi_k3_npu.engines.sglang.experts import DeepEP
from kimi_k3_npu.engines.sglang.layout import engine_layout, engine_mesh, token_counts
from kimi_k3_npu.engines.sglang.registry import check_live
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM, empty_bank
from kimi_k3_npu.model.moe import DispatchedMoE

_log = logging.getLogger(__name__)


class KimiK3ForSGLang(nn.Module):
    """Our network behind SGLang's interface. SGLang probes a model for many names; only those below are meant.

    Everything that the launch options decide is decided here, and logged once.
    """

    #: SGLang refuses with this whatever would hand us tensors. From disk, `reload` serves it.
    _derived_weight_cache_error = (
        "This model reads the slices that a rank needs from the checkpoint itself and takes no tensors; use "
        "/update_weights_from_disk."
    )

    def __init__(self, config: Any, quant_config: Any = None) -> None:
        super().__init__()
        check_live()
        envs.check()
        if (found := engine.SGLANG.installed()) != engine.SGLANG.tested:
            _log.warning("SGLang %s is installed; this plugin was tested with %s", found, engine.SGLANG.tested)
        self.config = config  # SGLang's; ours is network.config
        ours, layout, dtype = checkpoint.launched_config(config), engine_layout(), torch.get_default_dtype()
        self._source: weights.Source | None = checkpoint.launched_source(ours)
        self.network = weights.empty_network(
            ours,
            self._source,
            engine_mesh(layout),
            dtype=dtype,
            vision=getattr(config, images.TAKES_IMAGES, False),
        ).requires_grad_(False)
        self.attention = EngineAttention(self.network.layers, *engine.attention_backends())
        dispatch = self._use_dispatch()
        stage = layout.stage_layers(self.network.mesh.stage, ours.text)
        self.start_layer, self.end_layer = stage.start, stage.stop
        text = getattr(config, "text_config", config)
        self.logits_processor = engine.LogitsProcessor(text) if self.network.is_last else None
        # Not submodules: they hold no weights of their own.
        self._ends = (_Embedding(self.network), _Head(self.network) if self.network.lm_head else None)
        self._taps: tuple[int, ...] = ()
        self._check_options()
        _log.info(
            "%s: layout %s, layers %d to %d, %s attention, experts by %s, %s",
            type(self).__name__,
            layout,
            self.start_layer,
            self.end_layer - 1,
            self.attention.form.__name__,
            dispatch,
            str(dtype).removeprefix("torch."),
        )

    @property
    def lm_head(self) -> nn.Module | None:
        """The head's shard of the vocabulary, for SGLang's logits processor and for draft models that share it."""
        return self._ends[1]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """One pass of this stage: logits from the last, else the tensors for the next."""
        network, attention = self.network, self.attention.for_batch(forward_batch)
        mesh = network.mesh
        counts = token_counts(forward_batch, len(input_ids), mesh.layout, mesh.dp.rank)
        if not network.is_first:
            prefix = pp_proxy_tensors["hidden_states"]
            bank = pp_proxy_tensors.tensors.get("attn_res_bank", empty_bank(prefix))
        elif input_embeds is not None:
            prefix = input_embeds.to(network.dtype)
            bank = empty_bank(prefix)
        else:
            prefix = self._embed(input_ids, forward_batch, counts)
            bank = empty_bank(prefix)
        taps = self._inherited_taps(prefix, bank, pp_proxy_tensors)

        def tap(layer: int, prefix: Tensor, bank: Tensor) -> None:
            if layer in self._taps and (layer + 1 < self.end_layer or network.is_last):
                taps.append(network.read_after(layer, prefix, bank))

        prefix, bank = network.run_layers(prefix, bank, attention, counts, tap if self._taps else None)
        if not network.is_last:
            return self._to_next_stage(prefix, bank, taps)
        hidden = network.finish(prefix, bank)
        assert self.logits_processor is not None
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch, taps or None)

    def _embed(self, input_ids: Tensor, forward_batch: Any, counts: Sequence[int]) -> Tensor:
        if self.network.vision_tower is not None and forward_batch.contains_mm_inputs():
            return images.embeddings(self, self.network, input_ids, forward_batch, counts)
        return self.network.embed(input_ids, counts)

    def get_image_feature(self, items: Sequence[Any]) -> Tensor:
        """The rows of these images for the prompt, end to end."""
        return images.features(self.network, items)

    def pad_input_ids(self, input_ids: Any, mm_inputs: Any) -> Any:
        """Put a value of each image in the places of its features, for the cache of prefixes to tell images apart."""
        return engine.pad_mm_tokens(input_ids, mm_inputs)

    def _inherited_taps(self, prefix: Tensor, bank: Tensor, received: Any) -> list[Tensor]:
        """Taps of earlier stages, and that after the last of their layers, which our first layer reads."""
        taps: list[Tensor] = []
        if not self.network.is_first and self._taps:
            if "dspark_hidden_states" in received.tensors:
                taps.append(received["dspark_hidden_states"])
            if self.start_layer - 1 in self._taps:
                taps.append(self.network.read_after(self.start_layer - 1, prefix, bank))
        return taps

    def _to_next_stage(self, prefix: Tensor, bank: Tensor, taps: Sequence[Tensor]) -> Any:
        tensors = {"hidden_states": prefix}
        if self.network.config.text.attn_res_block_size is not None:
            tensors["attn_res_bank"] = bank
        if taps:
            tensors["dspark_hidden_states"] = torch.cat(list(taps), dim=-1)
        return engine.PPProxyTensors(tensors)

    def load_weights(self, weights_iterator: Iterable[Any]) -> None:
        """Called once by SGLang's loader, whose iterator is left alone: it would read every tensor on every rank."""
        if isinstance(weights_iterator, list | tuple | dict):
            raise LaunchError(self._derived_weight_cache_error)
        assert self._source is not None, "SGLang loads weights once; `reload` changes them"
        self.load(self._source)
        self._source = None  # it lists every tensor of the checkpoint

    def load(self, source: weights.Source) -> None:
        """Fill the network. Raises CheckpointError; the weights are then not to be used."""
        weights.load(self.network, source)
        self.attention.refresh()

    def post_load_weights(self) -> None:
        """Called by SGLang where it has filled the parameters itself (`--load-format dummy`)."""
        self.network.prepare()
        self.attention.refresh()

    def set_dspark_layers_to_capture(self, layer_ids: Sequence[int] | None) -> None:
        """Give the logits processor what follows each of these layers reads, before its norm."""
        if not layer_ids:
            raise LaunchError("hidden states are tapped after named layers; give the layers")
        self._taps = tuple(sorted(layer_ids))

    set_dflash_layers_to_capture = set_dspark_layers_to_capture

    def get_pp_proxy_dspark_hidden_size(self) -> int:
        """Width of the taps that earlier stages hand on."""
        return self.network.config.text.hidden_size * sum(layer < self.start_layer - 1 for layer in self._taps)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of ids that all ranks of a replica share, as draft models call it."""
        table, mesh = self.network.embed_tokens, self.network.mesh
        if table is None:
            raise LaunchError("the embedding is with the first pipeline stage")
        if mesh.dp.size > 1 and mesh.vocab.size > mesh.attn_tp.size:
            raise LaunchError("this use of the embedding with attention data parallelism needs --enable-dp-lm-head")
        return self._ends[0]

    def _use_dispatch(self) -> str:
        """Put SGLang's dispatcher into the layers if it is to be used. Returns what carries tokens to experts."""
        network, mesh = self.network, self.network.mesh
        choice = envs.one_of(envs.SGLANG_EXPERT_DISPATCH, ("deepep", "own"))
        if not mesh.layout.uses_all_to_all:
            if choice:
                raise LaunchError(f"{envs.SGLANG_EXPERT_DISPATCH}={choice} needs --moe-a2a-backend deepep")
            return "gather"
        on_npu = network.device.type == "npu"
        if (choice or ("deepep" if on_npu else "own")) == "own":
            if on_npu and engine.get_exec().graph.cuda_graph_config.decode.backend != "disabled":
                raise LaunchError(
                    f"{envs.SGLANG_EXPERT_DISPATCH}=own takes its row counts to the host, which a captured graph "
                    "cannot; use deepep, or --disable-cuda-graph"
                )
            return "our all-to-all"
        for module in network.modules():
            if isinstance(module, DispatchedMoE):
                coordinator = engine.get_parallel().moe_ep_group
                module.dispatch = DeepEP(network.config.text, mesh.ep, coordinator, network.dtype)
        return "DeepEP"

    def _check_options(self) -> None:
        """Refuse what would change results or memory in silence."""
        network = self.network
        vocab, mesh = network.config.text.vocab_size, network.mesh
        if mesh.layout.enable_dp_lm_head and vocab % mesh.vocab.size:
            raise LaunchError(
                f"--enable-dp-lm-head splits the vocabulary of {vocab} unevenly over {mesh.vocab.size} ranks; "
                "leave it out"
            )
        if self.attention.form is Ascend:
            options.MLAPO.check(engine.engine_envs.SGLANG_NPU_USE_MLAPO.get())
        if network.dtype == torch.float32 and engine.engine_envs.SGLANG_MAMBA_CONV_DTYPE.get() != "float32":
            warnings.warn(
                "SGLang keeps convolution windows in bfloat16, which an fp32 model notices; set "
                "SGLANG_MAMBA_CONV_DTYPE=float32",
                stacklevel=2,
            )


class _Head(nn.Module):
    """The head as draft workers read it: its rows, and which of the vocabulary they are."""

    def __init__(self, network: KimiK3ForCausalLM) -> None:
        super().__init__()
        assert network.lm_head is not None
        vocab, group = network.config.text.vocab_size, network.mesh.vocab
        self.weight = network.lm_head.weight
        self.org_vocab_size = vocab
        share, held = group.padded_part(vocab)
        self.shard_indices = engine.VocabParallelEmbeddingShardIndices(
            padded_org_vocab_start_index=held.start,
            padded_org_vocab_end_index=held.start + share,
            padded_added_vocab_start_index=vocab,
            padded_added_vocab_end_index=vocab,
            org_vocab_start_index=held.start,
            org_vocab_end_index=held.stop,
            added_vocab_start_index=vocab,
            added_vocab_end_index=vocab,
        )


class _Embedding(nn.Module):
    def __init__(self, network: KimiK3ForCausalLM) -> None:
        super().__init__()
        self._network = (network,)  # not a submodule

    def forward(self, ids: Tensor) -> Tensor:
        (network,) = self._network
        return network.embed(ids, [len(ids)] * network.mesh.dp.size)
