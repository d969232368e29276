"""Options of other tools: which a plan needs, and what those mean that distir does not do.

Names and defaults: torchtitan 0.2.2, `torchtitan/config/job_config.py` (February 2026: the last release that reads
TOML; later ones take most of these settings as flags); Megatron-LM, `megatron/training/arguments.py` at commit
000c4ac24f61159c138b0975def722c65245983c. `tests/api/interop` has both lists, and compares.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class ToolOption(NamedTuple):
    """An option that may concern the plan.

    `default`: its value where the file does not give it. `type`: of its value: bool, int, str, or list of words.
    `field`: None for one that is read; else the field of a plan (or `precision`) that it would be in, if it has another
    value than the default, which distir cannot do; an empty one if that is done nearly so, or changes nothing that is
    planned, and only noted where `reason` is not empty. `choices`: its values, if they are few.
    """

    type: type
    default: Any = None
    field: str | None = None
    reason: str = ""
    choices: tuple[str, ...] = ()


TORCHTITAN: dict[str, dict[str, ToolOption]] = {
    "parallelism": {
        "data_parallel_replicate_degree": ToolOption(int, 1),
        "data_parallel_shard_degree": ToolOption(int, -1),
        "fsdp_reshard_after_forward": ToolOption(str, "default", choices=("default", "always", "never")),
        "tensor_parallel_degree": ToolOption(int, 1),
        "disable_loss_parallel": ToolOption(bool, False, "tp", "logits that each shard has in full"),
        "enable_async_tensor_parallel": ToolOption(
            bool, False, "", "communication of tensor parallelism is predicted whole, not in parts beside products"
        ),
        "pipeline_parallel_degree": ToolOption(int, 1),
        "module_fqns_per_model_part": ToolOption(list, None, "cut", "stages of given modules"),
        "pipeline_parallel_first_stage_less_layers": ToolOption(int, 1, "cut"),
        "pipeline_parallel_last_stage_less_layers": ToolOption(int, 1, "cut"),
        "pipeline_parallel_layers_per_stage": ToolOption(int, None),
        "pipeline_parallel_schedule": ToolOption(str, "1F1B"),
        "pipeline_parallel_schedule_csv": ToolOption(str, ""),
        "pipeline_parallel_microbatch_size": ToolOption(int, 1),
        "pipeline_parallel_expert_parallel_overlap": ToolOption(bool, True, ""),
        "context_parallel_degree": ToolOption(int, 1),
        "context_parallel_load_balancer": ToolOption(str, "headtail", ""),
        "context_parallel_rotate_method": ToolOption(
            str, "allgather", "", "context parallelism gathers keys and values"
        ),
        "expert_parallel_degree": ToolOption(int, 1),
        "expert_tensor_parallel_degree": ToolOption(int, 1),
        "expert_parallel_comm_backend": ToolOption(str, "standard", ""),
    },
    "activation_checkpoint": {
        "mode": ToolOption(str, "selective", choices=("selective", "full", "memory_budget", "none")),
        "selective_ac_option": ToolOption(str, "2"),
        "per_op_sac_force_recompute_mm_shapes_by_fqns": ToolOption(list, ["moe.router.gate"], ""),
        "early_stop": ToolOption(bool, False, ""),
        "memory_budget": ToolOption(float, 0.5, ""),
        "visualize_memory_budget_pareto": ToolOption(bool, False, ""),
        "preserve_rng_state": ToolOption(bool, True, ""),
        "determinism_check": ToolOption(str, "default", ""),
        "debug": ToolOption(bool, False, ""),
    },
    "training": {
        "dataset": ToolOption(str, "c4_test", ""),
        "dataset_path": ToolOption(str, None, ""),
        "local_batch_size": ToolOption(int, 8),
        "global_batch_size": ToolOption(int, -1),
        "seq_len": ToolOption(int, 2048),
        "max_norm": ToolOption(float, 1.0, ""),
        "steps": ToolOption(int, 10000, ""),
        "enable_cpu_offload": ToolOption(bool, False, "zero", "weights and optimizer state in the host's memory"),
        "dtype": ToolOption(str, "float32", choices=("bfloat16", "float32")),
        "mixed_precision_param": ToolOption(str, "bfloat16", choices=("bfloat16", "float32")),
        "mixed_precision_reduce": ToolOption(str, "float32", choices=("float32",)),
        "gc_freq": ToolOption(int, 50, ""),
        "gc_debug": ToolOption(bool, False, ""),
        "dataloader": ToolOption(dict, None, ""),
    },
}
"""By section and key. Other sections do not concern the plan."""

MEGATRON: dict[str, ToolOption] = {
    "--tensor-model-parallel-size": ToolOption(int, 1),
    "--pipeline-model-parallel-size": ToolOption(int, 1),
    "--num-layers-per-virtual-pipeline-stage": ToolOption(int),
    "--num-virtual-stages-per-pipeline-rank": ToolOption(int),
    "--decoder-first-pipeline-num-layers": ToolOption(int),
    "--decoder-last-pipeline-num-layers": ToolOption(int),
    "--account-for-embedding-in-pipeline-split": ToolOption(bool, False),
    "--account-for-loss-in-pipeline-split": ToolOption(bool, False),
    "--context-parallel-size": ToolOption(int, 1),
    "--expert-model-parallel-size": ToolOption(int, 1),
    "--expert-tensor-parallel-size": ToolOption(int),
    "--sequence-parallel": ToolOption(bool, False),
    "--micro-batch-size": ToolOption(int),
    "--global-batch-size": ToolOption(int),
    "--use-distributed-optimizer": ToolOption(bool, False),
    "--num-distributed-optimizer-instances": ToolOption(int, 1),
    "--use-megatron-fsdp": ToolOption(bool, False),
    "--data-parallel-sharding-strategy": ToolOption(
        str, "no_shard", choices=("no_shard", "optim", "optim_grads", "optim_grads_params")
    ),
    "--ckpt-format": ToolOption(str, "torch_dist", ""),
    "--use-torch-fsdp2": ToolOption(bool, False),
    "--torch-fsdp2-no-reshard-after-forward": ToolOption(bool, False),
    "--recompute-activations": ToolOption(bool, False),
    "--recompute-granularity": ToolOption(str, choices=("full", "selective")),
    "--recompute-method": ToolOption(str, choices=("uniform", "block")),
    "--recompute-num-layers": ToolOption(int),
    "--recompute-modules": ToolOption(list),
    "--bf16": ToolOption(bool, False),
    "--fp16": ToolOption(bool, False),
    "--grad-reduce-in-bf16": ToolOption(bool, False),
    "--accumulate-allreduce-grads-in-fp32": ToolOption(bool, False),
    "--overlap-grad-reduce": ToolOption(bool, False),
    "--overlap-param-gather": ToolOption(bool, False),
    "--ddp-bucket-size": ToolOption(int),
    "--ddp-num-buckets": ToolOption(int),
    "--use-tp-pp-dp-mapping": ToolOption(bool, False),
    "--num-layers": ToolOption(int),
    "--seq-length": ToolOption(int),
    "--make-vocab-size-divisible-by": ToolOption(int),
    # what distir does not do
    "--rampup-batch-size": ToolOption(list, None, "microbatches", "a batch that grows"),
    "--pipeline-model-parallel-layout": ToolOption(str, None, "cut", "stages of given layers"),
    "--distribute-saved-activations": ToolOption(bool, False, "recompute", "saved activations split over shards"),
    "--cpu-offloading-num-layers": ToolOption(int, 0, "recompute", "activations in the host's memory"),
    "--optimizer-cpu-offload": ToolOption(bool, False, "zero", "optimizer state in the host's memory"),
    "--enable-full-sharding-in-hsdp": ToolOption(bool, False, "zero", "ZeRO over groups and replicas of them"),
    "--fp8-format": ToolOption(str, None, "precision", "products in 8 bits"),
    "--fp4-format": ToolOption(str, None, "precision", "products in 4 bits"),
    "--hierarchical-context-parallel-sizes": ToolOption(list, None, "split", "context parallelism of several levels"),
    # what is predicted nearly so
    "--tp-comm-overlap": ToolOption(
        bool, False, "", "communication of tensor parallelism is predicted whole, not in parts beside products"
    ),
    "--cp-comm-type": ToolOption(list, ["p2p"], "", "context parallelism gathers keys and values"),
    "--overlap-param-gather-with-optimizer-step": ToolOption(bool, False, "", "gathers follow the optimizer"),
    "--defer-embedding-wgrad-compute": ToolOption(bool, False, "", "weight gradients are not deferred"),
    "--overlap-moe-expert-parallel-comm": ToolOption(
        bool, False, "", "all-to-alls of experts run beside what does not need them, not beside other microbatches"
    ),
    "--moe-shared-expert-overlap": ToolOption(bool, False, ""),
    "--microbatch-group-size-per-virtual-pipeline-stage": ToolOption(
        int, None, "", "groups of microbatches have as many as there are pipeline ranks"
    ),
    "--ddp-reduce-scatter-with-fp32-accumulation": ToolOption(bool, False, "", "gradients are sent as they are"),
    # what only sounds as if it concerned the plan
    **{
        name: ToolOption(kind, None, "")
        for name, kind in {
            "--data-parallel-random-init": bool,
            "--no-async-tensor-model-parallel-allreduce": bool,
            "--pipeline-model-parallel-comm-backend": str,
            "--no-overlap-p2p-communication": bool,
            "--overlap-p2p-communication-warmup-flush": bool,
            "--overlap-cpu-optimizer-d2h-h2d": bool,
            "--optimizer-offload-fraction": float,
            "--use-torch-optimizer-for-cpu-offload": bool,
            "--no-scatter-gather-tensors-in-pipeline": bool,
            "--disable-tp-comm-overlap-ag": bool,
            "--disable-tp-comm-overlap-rs": bool,
            "--tp-comm-overlap-rs-dgrad": bool,
            "--tp-comm-overlap-cfg": str,
            "--decrease-batch-size-if-needed": bool,
            "--ddp-average-in-collective": bool,
            "--ddp-pad-buckets-for-high-nccl-busbw": bool,
            "--fsdp-double-buffer": bool,
            "--dist-ckpt-optim-fully-reshardable": bool,
            "--distrib-optim-fully-reshardable-mem-efficient": bool,
            "--no-strict-fsdp-dtensor-load": bool,
            "--ckpt-fully-parallel-save": bool,
            "--ckpt-fully-parallel-load": bool,
            "--no-ckpt-fully-parallel-save": bool,
        }.items()
    },
}
"""By name."""
CONCERNS = ("parallel", "pipeline", "stage", "recompute", "fsdp", "overlap", "shard", "offload", "batch-size")
"""An option of Megatron-LM whose name has one of these may change the plan, if `MEGATRON` does not say what it does."""
