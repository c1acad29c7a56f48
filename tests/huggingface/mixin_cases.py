"""From Hugging Face's test mixins to test cases: transformers' own Qwen3.5 text model, and variants of ours.

They differ in their classes and in `attn_res` only: same sizes, same inputs, same seed before every test.
"""

from __future__ import annotations

import copy
import dataclasses
import unittest
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
from mixin_source import mixin_module
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3_5TextModel, set_seed
from transformers import initialization as init
from transformers.models.auto import modeling_auto
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextForSequenceClassification

import attention_residuals as ar

STOCK = (Qwen3_5TextConfig, Qwen3_5TextModel, Qwen3_5ForCausalLM, Qwen3_5TextForSequenceClassification)
OURS = (
    ar.Qwen3_5AttnResConfig,
    ar.Qwen3_5AttnResModel,
    ar.Qwen3_5AttnResForCausalLM,
    ar.Qwen3_5AttnResForSequenceClassification,
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """The classes that a test case uses, and how their reads are set up."""

    classes: tuple[type, ...]
    attn_res: ar.AttnResConfig | None = None
    trained: bool = False  # queries and key weights far from their start, as training leaves them


# Three sublayers a block close the first block between the token mixer and the MLP of the second layer.
BLOCK = ar.AttnResConfig(mode="block", sublayers_per_block=3)
FULL = ar.AttnResConfig(mode="full")
VARIANTS = {
    "stock": Variant(STOCK),
    "standard": Variant(OURS, ar.AttnResConfig(mode="standard")),
    "block": Variant(OURS, BLOCK),
    "full": Variant(OURS, FULL),
    "trained block": Variant(OURS, BLOCK, trained=True),
    "trained full": Variant(OURS, FULL, trained=True),
}

# Mixins that apply to a language model. Not among them: PipelineTesterMixin needs models from the Hub.
MIXINS = {
    "test_modeling_common": "ModelTesterMixin",
    "test_training_mixin": "TrainingTesterMixin",
    "test_tensor_parallel_mixin": "TensorParallelTesterMixin",
    "test_fsdp_mixin": "FSDPTesterMixin",
}

# The mixins look up by class name what a model is for; there the tables of transformers' own models decide.
_NAME_TABLES = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
)

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 37,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


class ModelTester:
    """What the mixins ask of a model tester: a tiny configuration, inputs, and expected numbers."""

    batch_size, seq_length, num_labels, is_training = 13, 7, 3, True
    hidden_size, num_hidden_layers = SIZES["hidden_size"], SIZES["num_hidden_layers"]
    num_attention_heads, vocab_size = SIZES["num_attention_heads"], SIZES["vocab_size"]

    def __init__(self, variant: Variant) -> None:
        self.config_class, self.base_model_class, self.causal_lm_class, self.sequence_classification_class = (
            variant.classes
        )
        # All fields, since the configuration completes them and must give back what it was given.
        self.settings = {} if variant.attn_res is None else {"attn_res": variant.attn_res.to_dict()}

    @property
    def all_model_classes(self) -> tuple[type, ...]:
        return self.base_model_class, self.causal_lm_class, self.sequence_classification_class

    def get_config(self) -> Any:
        return self.config_class(**copy.deepcopy({**SIZES, **self.settings}))  # some tests edit what they got

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        shape = (self.batch_size, self.seq_length)
        input_ids = mixin_module("test_modeling_common").ids_tensor(shape, self.vocab_size)
        return self.get_config(), {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids).tril(),
        }


class _Case:
    """Beside the mixins' tests: the configuration's, and what a Qwen3.5 needs said about it."""

    variant: Variant
    # Otherwise decided by the copyright year in the configuration's source file, which ours lacks.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        set_seed(0)
        mixin_module("test_modeling_common").global_rng.seed(0)
        self.model_tester = ModelTester(self.variant)
        self.all_model_classes = self.model_tester.all_model_classes
        if self.variant.trained:
            _start_reads_trained(self)  # type: ignore[arg-type]

    def test_config(self) -> None:
        tester = mixin_module("test_configuration_common").ConfigTester(
            self, config_class=self.model_tester.config_class, **self.model_tester.settings
        )
        tester.run_common_tests()

    def test_attention_outputs(self) -> None:
        # The mixin expects attentions from every layer, but Gated DeltaNet has none to give.
        self.model_tester.num_hidden_layers = SIZES["layer_types"].count("full_attention")
        super().test_attention_outputs()  # type: ignore[misc]


def _start_reads_trained(case: unittest.TestCase) -> None:
    """For one test: new reads start at fixed values far from zero queries and key weights of one."""

    def fill(read: ar.DepthRead, assign: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        angles = torch.arange(read.width, dtype=torch.float32)
        assign(read.query, 0.3 * torch.sin(angles))
        assign(read.key_weight, 1 + 0.3 * torch.cos(angles))

    def patch(cls: type, name: str, replacement: Callable[..., None]) -> None:
        patcher = unittest.mock.patch.object(cls, name, replacement)
        patcher.start()
        case.addCleanup(patcher.stop)

    plain_init = ar.DepthRead.__init__

    def __init__(read: ar.DepthRead, *args: Any, **kwargs: Any) -> None:
        plain_init(read, *args, **kwargs)
        with torch.no_grad():
            fill(read, lambda parameter, value: parameter.copy_(value))

    patch(ar.DepthRead, "__init__", __init__)
    for cls in OURS[1:]:

        def _init_weights(model: Any, module: torch.nn.Module, plain: Any = cls._init_weights) -> None:
            fill(module, init.copy_) if isinstance(module, ar.DepthRead) else plain(model, module)

        patch(cls, "_init_weights", _init_weights)


def build_cases(stood_in: list[str]) -> dict[str, type[unittest.TestCase]]:
    """A test case per variant. `stood_in`: the modules that `mixin_source.load` replaced."""
    for table, stock, ours in zip(_NAME_TABLES, STOCK[1:], OURS[1:], strict=True):
        names = getattr(modeling_auto, table)
        assert stock.__name__ in names.values(), f"{stock.__name__} left {table}"
        names[OURS[0].model_type] = ours.__name__
    mixins = [getattr(mixin_module(module), name) for module, name in MIXINS.items()]
    body: dict[str, Any] = {}
    if "generation.test_utils" in stood_in:
        reason = "GenerationTesterMixin is not in the source distribution"
        body["test_generation_tester_mixin_inheritance"] = unittest.skip(reason)(lambda self: None)
    else:
        mixins.insert(1, mixin_module("generation.test_utils").GenerationTesterMixin)
    return {
        name: type(f"Qwen3_5 {name}", (_Case, *mixins, unittest.TestCase), {**body, "variant": variant})
        for name, variant in VARIANTS.items()
    }
