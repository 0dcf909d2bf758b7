"""Tables of the attributes of a Paddle fleet description: those that are read, refused or noted.

Names and defaults are those of the fields that fleet's own descriptions have.

Source: PaddlePaddle, distributed_strategy.proto and distributed_strategy.py, 2020 to 2023.
"""

from typing import Any, NamedTuple


class Key(NamedTuple):
    """A key of one of fleet's configs; a tuple as default stands for a list."""

    default: Any = None
    refused: str = ""
    """Reason why the key must keep its default."""
    noted: str = ""
    """Reason why the key has no counterpart; reported if its value differs from the default."""


_AUTOCAST = "autocast decides per operation; use torch.autocast(enabled=False) in the model"
_AVERAGED = "gradients are averaged over ranks; multiply the loss instead"
_GROWTH = "here every overflow divides by the growth factor"
_UNSPLIT = "tensors are not split over ranks"
_SHARDED = (
    "a description cannot shard optimizer state and parameters: call fully_shard, and pass mesh= "
    "to prepare"
)
_A_SYNC = (
    "k_steps max_merge_var_num send_queue_size independent_recv_thread thread_pool_size "
    "min_send_grad_num_before_recv send_wait_times runtime_split_send_recv launch_barrier "
    "heter_worker_device_guard lr_decay_steps use_ps_gpu"
)

CONFIGS: dict[str, dict[str, Key]] = {
    "amp_configs": {
        "init_loss_scaling": Key(32768.0),
        "incr_every_n_steps": Key(1000),
        "incr_ratio": Key(2.0),
        "use_dynamic_loss_scaling": Key(True),
        "decr_every_n_nan_or_inf": Key(2, noted=_GROWTH),
        "decr_ratio": Key(0.8, noted=_GROWTH),
        "custom_white_list": Key((), _AUTOCAST),
        "custom_black_list": Key((), _AUTOCAST),
        "custom_black_varnames": Key((), _AUTOCAST),
        "use_pure_fp16": Key(False, "convert the model's dtype yourself"),
        "use_fp16_guard": Key(
            True, noted="autocast decides per operation, there is no guarded region"
        ),
    },
    "recompute_configs": {
        "checkpoints": Key(()),
        "enable_offload": Key(False, "checkpoints are not moved to the host"),
        "checkpoint_shape": Key((), noted="shapes are taken from the tensors"),
    },
    "pipeline_configs": {
        "micro_batch": Key(1),
        "accumulate_steps": Key(1),
        "micro_batch_size": Key(1, noted="follows from the size of the batch and micro_batches"),
        "schedule_mode": Key("1F1B"),
        "p2p_cache_shape": Key(True, noted="stages agree on shapes once"),
    },
    "gradient_merge_configs": {"k_steps": Key(1), "avg": Key(True)},
    "dgc_configs": {"rampup_begin_step": Key(0), "rampup_step": Key(1), "sparsity": Key(())},
    "lars_configs": {
        "lars_coeff": Key(0.001),
        "lars_weight_decay": Key(0.0005),
        "epsilon": Key(0.0),
        "exclude_from_weight_decay": Key(()),
    },
    "lamb_configs": {"lamb_weight_decay": Key(0.01), "exclude_from_weight_decay": Key(())},
    "localsgd_configs": {"k_steps": Key(1), "begin_step": Key(1)},
    "adaptive_localsgd_configs": {"init_k_steps": Key(1), "begin_step": Key(1)},
    "hybrid_configs": {
        "dp_degree": Key(-1),
        "pp_degree": Key(1),
        "mp_degree": Key(1, _UNSPLIT),
        "sharding_degree": Key(1, _SHARDED),
    },
    "gradient_scale_configs": {
        "scale_strategy": Key("avg", _AVERAGED),
        "scale_gradient": Key(False, _AVERAGED),
    },
    "a_sync_configs": dict.fromkeys(_A_SYNC.split(), Key()),
}
"""The configs that are read, with their keys."""

_NAME_FEATURES = "name the features you want"
REFUSED = {
    "sharding": _SHARDED,
    "tensor_parallel": _UNSPLIT,
    "fp16_allreduce": "gradients are exchanged in their own dtype; dgc with value_bits=16 sends "
    "fewer bytes",
    "asp": "structured sparsity of weights is not supported",
    "sync_batch_norm": "convert the model with torch.nn.SyncBatchNorm before prepare",
    "auto": _NAME_FEATURES,
    "semi_auto": _NAME_FEATURES,
    "auto_search": _NAME_FEATURES,
}
"""Flags that must stay off, with the reason."""

_NOTED = {
    "has no effect in fleet either; engine.load resumes on another number of ranks": "elastic",
    "torch.distributed decides, with the same result": (
        "sync_nccl_allreduce nccl_comm_num use_hierarchical_allreduce "
        "hierarchical_allreduce_inter_nranks"
    ),
    "buckets are chosen here": (
        "fuse_all_reduce_ops fuse_grad_size_in_MB fuse_grad_size_in_TFLOPS "
        "_fuse_grad_size_in_TFLOPS fuse_grad_size_in_num fuse_grad_merge last_comm_group_size_MB"
    ),
    "a parameter that has no gradient on any rank is skipped; one that has a gradient on some "
    "ranks only is an error on all ranks": "find_unused_parameters",
    "there is no graph of operators": (
        "without_graph_optimization calc_comm_same_stream _calc_comm_same_stream "
        "build_strategy execution_strategy"
    ),
    "set torch.backends.cudnn instead": (
        "cudnn_exhaustive_search conv_workspace_size_limit cudnn_batchnorm_spatial_persistent"
    ),
    "used by the parameter-server back-end only": (
        "adam_d2sum heter_ccl_mode trainer_desc_configs downpour_table_param fs_client_param"
    ),
}
"""Attributes without counterpart, by reason."""
NOTED = {name: reason for reason, names in _NOTED.items() for name in names.split()}
"""Attributes without counterpart, whatever their value, with the reason."""
