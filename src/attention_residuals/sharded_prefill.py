"""Prefill of a long prompt in which each rank holds the block sums of its own tokens only.

Reads and MLPs see one token at a time, token mixers see all. So the residual stream is sharded along the
sequence over the ranks that share the tokens, usually those of tensor parallelism, and whole tokens exist
around the mixers only (arXiv 2603.15031, section on infrastructure):

    own tokens -> read, norm -> all-gather -> token mixer -> keep own tokens -> read, norm -> MLP -> ...

The prompt enters in chunks, through transformers' own cache. Of N sources [B, T, D] a rank then holds
N B C D / R numbers, with chunks of C tokens over R ranks. The embedding enters the model as a `DTensor`, so
that masks and positions are those of the whole chunk; the stream begins with the rank's own part of it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import implicit_replication

from attention_residuals.models.families import FAMILIES, Family
from attention_residuals.models.mixins import AttnResBackbone, family_of

# families whose mixer ignores the cached state when it is given several tokens at once
_NEVER_IN_CHUNKS = ("mamba",)


class TokenShards(NamedTuple):
    """How `num_tokens` tokens lie over the R ranks of a mesh: in order, as in `DTensor`'s `Shard(1)`.

    Each rank has ceil(T / R) of them, the last one what remains.
    """

    mesh: DeviceMesh
    num_tokens: int

    @property
    def most(self) -> int:
        """Tokens of the first rank, which never has fewer than another."""
        return -(-self.num_tokens // self.mesh.size())

    @property
    def every_rank_has_some(self) -> bool:
        return self.most * (self.mesh.size() - 1) < self.num_tokens

    def keep(self, whole: Tensor) -> Tensor:
        """Of [B, T, ...], equal on every rank, this rank's tokens; a view."""
        first = self.most * self.mesh.get_local_rank()
        return whole[:, first : first + self.most]

    def as_dtensor(self, own: Tensor) -> DTensor:
        """This rank's tokens [B, own, D] as part of the logical tensor [B, T, D]; no copy."""
        shape = torch.Size((own.shape[0], self.num_tokens, own.shape[2]))
        stride = torch.empty(shape, device="meta").stride()
        own = own.contiguous()
        return DTensor.from_local(own, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)

    def gather(self, own: Tensor) -> Tensor:
        """All ranks' tokens [B, T, D] on every rank."""
        return self.as_dtensor(own).full_tensor()

    def last_token(self, own: Tensor) -> Tensor:
        """The last token's state on every rank, in the shape [B, T, D] of all; takes the memory of one."""
        last = own[:, -1:].contiguous()
        dist.broadcast(last, group=self.mesh.get_group(), group_src=self.mesh.size() - 1)
        return last.expand(-1, self.num_tokens, -1)


def sharded_prefill(
    model: Any,
    input_ids: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    chunk: int = 16384,
    cache: Any = None,
) -> tuple[Tensor, Any]:
    """Prefill with the block sums sharded along the sequence; equals `model(input_ids)` up to rounding.

    Every rank of the group calls it with the same arguments. The weights may be whole on every rank, or
    tensor-parallel over the same ranks by transformers' own plan.

    Args:
        model: a causal language model with attention residuals, of a family in `FAMILIES`, in eval mode.
        input_ids: [B, T] the whole prompt, without padding, the same on every rank.
        group: the ranks that share the tokens; by default all ranks, or this process alone where
            torch.distributed isn't initialised.
        chunk: tokens that enter the model at once, over all ranks.
        cache: transformers' cache of what came before the prompt; a new one by default.

    Returns:
        The last token's logits [B, 1, vocabulary] and the cache of the whole prompt, on every rank: what
        `model(input_ids, logits_to_keep=1)` gives. Under tensor parallelism a rank's cache holds its heads.

    Raises:
        ValueError: gradients are enabled, the model is in training mode, has no reads or no language head,
            records its depth weights, is of no known family, or can't take this prompt in chunks; the input
            isn't [B, T]; `chunk` is below 1; ranks differ in their arguments.
    """
    backbone = _checked_backbone(model)
    _check_prompt(model, input_ids, chunk, cache)
    mesh = _mesh(group, input_ids.device.type)
    if mesh is not None:
        _refuse_differences(mesh, input_ids, chunk)
    for ids in input_ids.split(chunk, dim=1):
        shards = None if mesh is None else TokenShards(mesh, ids.shape[1])
        given = {"cache": cache, "use_cache": True, "logits_to_keep": 1, "return_dict": True}
        if shards is None or not shards.every_rank_has_some:  # a few tokens over many ranks: whole on each
            outputs = model(input_ids=ids, **given)
        else:
            outputs = _sharded_forward(model, backbone, shards, ids, given)
        cache = outputs.cache
    return outputs.logits, cache


def _sharded_forward(
    model: Any, backbone: Any, shards: TokenShards, ids: Tensor, given: dict[str, Any]
) -> Any:
    """One chunk [B, C] over the ranks of the shards; `given` are the model's other arguments."""
    embedding = model.get_input_embeddings()
    # Where the vocabulary is sharded, all ranks must look up the same tokens together.
    sharded = _is_sharded(embedding)
    own = shards.keep(embedding(ids)).contiguous() if sharded else embedding(shards.keep(ids))
    # A learned position embedding is added to the tokens' before the first layer, as a plain tensor.
    with _gathered_around_mixers(backbone, shards), implicit_replication():
        return model(inputs_embeds=shards.as_dtensor(own), **given)


@contextlib.contextmanager
def _gathered_around_mixers(backbone: Any, shards: TokenShards) -> Iterator[None]:
    """Hooks for one forward: all tokens in mixers and sharded MLPs, the last token after the final norm."""

    def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": shards.gather(kwargs["hidden_states"])}
        return (shards.gather(args[0]), *args[1:]), kwargs

    def keep(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (shards.keep(output[0]), *output[1:])
        return shards.keep(output)

    def last_token(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return shards.last_token(output)

    family = family_of(backbone.config)
    with contextlib.ExitStack() as hooks:
        for layer in family.layers_of(backbone):
            for module in _modules_over_all_tokens(layer, family):
                hooks.callback(module.register_forward_pre_hook(gather, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(keep).remove)
        hooks.callback(family.final_norm_of(backbone).register_forward_hook(last_token).remove)
        yield


def _modules_over_all_tokens(layer: nn.Module, family: Family) -> list[nn.Module]:
    """A layer's token mixer, and what tensor parallelism has sharded: its ranks need the same tokens."""
    mixers = {name for name, _ in family.mixer_names}
    return [child for name, child in layer.named_children() if name in mixers or _is_sharded(child)]


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _checked_backbone(model: Any) -> Any:
    if torch.is_grad_enabled():
        raise ValueError(
            "sharded_prefill has no backward, but gradients are enabled; call it under torch.no_grad()"
        )
    if model.training:
        raise ValueError(
            "the model must be in eval mode, since ranks would drop different numbers; call model.eval()"
        )
    backbone = next((module for module in model.modules() if isinstance(module, AttnResBackbone)), None)
    if backbone is None or backbone.depth_plan.config.mode == "standard":
        raise ValueError(
            f"{type(model).__name__} has no depth reads, so it has no block sums to shard; give it some with "
            "attention_residuals.convert(), or prefill it as usual"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"sharded_prefill gives logits, but {type(model).__name__} has no language head")
    family = model.config.get_text_config().family
    if family not in FAMILIES:
        raise ValueError(
            f"sharded_prefill must know a layer's token mixer, but {family!r} isn't among the known "
            f"families: {', '.join(FAMILIES)}"
        )
    if backbone.depth_records:
        raise ValueError(
            "depth weights are recorded, but each rank would see those of its own tokens; leave "
            "record_depth_weights() before the prefill"
        )
    return backbone


def _check_prompt(model: Any, input_ids: Tensor, chunk: int, cache: Any) -> None:
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids must be [B, T] with at least one token, got the shape {tuple(input_ids.shape)}"
        )
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk must be a whole number of tokens of at least 1, got {chunk!r}")
    at_once = input_ids.shape[1] <= chunk and cache is None
    if model.config.get_text_config().family in _NEVER_IN_CHUNKS and not at_once:
        raise ValueError(
            f"{type(model).__name__} must take everything at once, since transformers' mixer of it begins "
            f"anew with several tokens; got {input_ids.shape[1]} in chunks of {chunk}"
            f"{'' if cache is None else ' after a cache'}, pass chunk={input_ids.shape[1]} and no cache"
        )


def _mesh(group: dist.ProcessGroup | None, device_type: str) -> DeviceMesh | None:
    """The ranks as a mesh; None where there is only one."""
    if group is None and not dist.is_initialized():
        return None
    ranks = dist.group.WORLD if group is None else group
    assert ranks is not None  # since torch.distributed is initialised
    return None if dist.get_world_size(ranks) == 1 else DeviceMesh.from_group(ranks, device_type)


def _refuse_differences(mesh: DeviceMesh, input_ids: Tensor, chunk: int) -> None:
    """Ranks with other tokens or chunks would give wrong numbers, or wait for each other for ever."""
    digest = hashlib.sha256(input_ids.cpu().contiguous().numpy().tobytes()).hexdigest()
    mine = (tuple(input_ids.shape), digest, chunk)
    found: list[Any] = [None] * mesh.size()
    dist.all_gather_object(found, mine, group=mesh.get_group())
    if any(other != found[0] for other in found):
        raise ValueError(
            "every rank must call sharded_prefill with the same input_ids and chunk, but they differ: shapes "
            f"{[shape for shape, _, _ in found]}, chunks {[size for _, _, size in found]}; broadcast the "
            "prompt from one rank"
        )
