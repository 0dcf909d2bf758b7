"""Internals that tests look at, each by the module it stands in: a module that moves changes
this file alone. Tests import them from here; public names come from `thinwire` itself.
"""

import importlib
from typing import Any

_NAMES = {
    "tests.one_tensor": (
        "FoldRule commit_ decode_positions decode_values encode_positions encode_values propose"
    ),
    "thinwire._watchdog": "Late within",
    "thinwire._launched": "launched_rank",
    "thinwire._names": "named_parameters names_matches=matches plain_name plain_names",
    "thinwire._wording": "near shown",
    "thinwire.checkpoint": (
        "combine export files load plan random_state read_rank_file save saving set_random_state "
        "tensor_file write_rank_file"
    ),
    "thinwire.checkpoint.combine": "Rule",
    "thinwire.checkpoint.files": "on_all_ranks",
    "thinwire.cli": "main",
    "thinwire.comm": (
        "Group Pending node_size_of private require_agreement sites_of sources_of "
        "waiting while_busy"
    ),
    "thinwire.comm.elastic": "connections_between",
    "thinwire.comm.failures": "HeartbeatThread",
    "thinwire.comm.nodes": "Grid",
    "thinwire.comm.private": "next_identity warn_of_restarts",
    "thinwire.comm.macs": "ALL_RANKS MessageMacs",
    "thinwire.comm.relay": (
        "ALL FRAME_BYTES GREETING HEAD NONCE_BYTES Answer Kind RelayClient RelayEndpoint hello_mac "
        "require_relay"
    ),
    "thinwire.comm.member_groups": "Channel MemberGroups",
    "thinwire.comm.replicate": "make_equal_",
    "thinwire.comm.sockets": "connections listeners shut_down",
    "thinwire.comm.stats": "Pace Rate planned_row",
    "thinwire.comm.waiting": "left_s one_deadline",
    "thinwire.compress": "COMPRESSIONS",
    "thinwire.compress.dense": "send_dense",
    "thinwire.compress.dgc": "DGC locally_clipped",
    "thinwire.compress.entries": "ArrivedEntries Proposed send_entries",
    "thinwire.compress.low_rank": "LowRank orthonormal",
    "thinwire.compress.protocol": (
        "AllGather AllReduce Arrived Compression Computed Context Kept RESIDUAL Sending Shapes "
        "combined"
    ),
    "thinwire.compress.split": "add_up shares",
    "thinwire.core.checksum": "checked_mean_ checked_sum checksum with_checksum",
    "thinwire.core.feedback": (
        "Proposal commit_list_ compile_loops propose_list rounding_seed step_along_list_ "
        "store_ sum_sparse top_k"
    ),
    "thinwire.core.gradients": "ClipByGlobalNorm ClipByNorm ClipByValue clipped L1Decay L2Decay",
    "thinwire.core.layerwise": "lamb_ lars_",
    "thinwire.core.loss_scale": "any_non_finite initial_scale next_scale",
    "thinwire.core.muon": "MuonRule muon_",
    "thinwire.core.norms": "sketch global_norm norm trust_ratio",
    "thinwire.core.tensors": "narrowed",
    "thinwire.exchange": "ranks=synchronizer",
    "thinwire.exchange.gradients": "GradientExchange gradients_of",
    "thinwire.exchange.overlap": "Overlap Readiness",
    "thinwire.exchange.checks": "GradientPattern",
    "thinwire.exchange.round": "Round",
    "thinwire.kernels": "Kernels compiled_steps numba_body=cpu reference threads=cpu",
    "thinwire.kernels.cpu": "has_address share_memory",
    "thinwire.kernels.reference": "mixed",
    "thinwire.kernels.rules": "Fold LambRule LarsRule OuterRule TrustRule",
    "thinwire.layout": "traffic",
    "thinwire.layout.message": (
        "HEADER_BYTES Layout CHECKSUM_BYTES SKETCH_NUMEL Slot VALUE_BITS WHOLE_BITS WholeLayout "
        "count_sent position_bytes value_bytes"
    ),
    "thinwire.layout.shares": "split_plan whole_split fragments_partition=contiguous",
    "thinwire.layout.traffic": (
        "Messages GATHER chosen_split first_split messages streams_between travels_checksummed"
    ),
    "thinwire.local": "updates work=steps",
    "thinwire.local.averager": "Averager",
    "thinwire.local.averaging": "Averaging PendingAveraging outer_step_",
    "thinwire.local.interval": "adapted_interval",
    "thinwire.local.model": "LocalModel",
    "thinwire.local.joiners": "JoinerState",
    "thinwire.local.updates": "LocalUpdates",
    "thinwire.local.steps": "RoundWork",
    "thinwire.members": "host meeting membership relay server transfer watcher",
    "thinwire.members.kv": "AuthenticatedStore KeyValueView",
    "thinwire.members.credentials": "derived_key new_token read_token Address parse_address",
    "thinwire.members.generation": "Decision Outcome",
    "thinwire.members.transfer": "Donor Download Part Recipient StateMessage TransferContext",
    "thinwire.members.group": "ElasticGroup",
    "thinwire.members.membership": "Membership",
    "thinwire.members.watcher": "Shared Terms Watcher",
    "thinwire.members.meeting": "connect require_same",
    "thinwire.members.host": "run_host",
    "thinwire.members.server": "HostedStore Journal serving",
    "thinwire.members.client": "HostStore",
    "thinwire.members.members": "Members",
    "thinwire.members.code": "certificate Code make_certificate read_code",
    "thinwire.members.relay": "relay_key Relay",
    "thinwire.optim": "dgc_momentum owners",
    "thinwire.page": "RunView SHOWN=_SHOWN",
    "thinwire.pipeline.runner": "PipelineRunner",
    "thinwire.pipeline.split": "split_model split_partition=partition",
    "thinwire.step.forwarding": "autocast_forward=Autocast",
    "thinwire.step.merge": "GradientSum",
    "thinwire.step.recompute": "recompute recompute_matches=matches",
    "thinwire.strategy": "prepare",
    "thinwire.strategy.clipping": "take_clip_",
    "thinwire.strategy.distributed_strategy": "DistributedStrategy",
    "thinwire.strategy.documents": "text_of",
    "thinwire.strategy.engine": "Engine",
    "thinwire.strategy.replace": "select_optimizer",
    "thinwire.strategy.rules": "FIELDS RULES page rule_of rules_between",
    "thinwire.stream": "coder",
    "thinwire.tools.app": "app",
    "thinwire.tools.compare": "comparison=compare",
    "thinwire.tools.compare.compare": "compare",
    "thinwire.tools.compare.page": ("BEST page_render=render page_write=write to_use"),
    "thinwire.tools.compare.record": ("Asked Failure KEYS Results Run common_loss first_reached"),
    "thinwire.tools.compare.results": "Ledger",
    "thinwire.tools.compare.settings": "Settings",
    "thinwire.tools.compare.strategies": "STRATEGIES choose",
    "thinwire.tools.compare.tables": "further print_table summary",
    "thinwire.tools.compare.verdict": "Verdict verdict",
    "thinwire.tools.doctor.local_checks": (
        "Finding as_text document has_remote_ranks machine_findings meeting_point note ok wrong"
    ),
    "thinwire.tools.doctor.interfaces": "Interface is_loopback listening program_of source_towards",
    "thinwire.tools.doctor.machine": "Machine",
    "thinwire.tools.doctor.pairs": "Answering Line Peer Reach TOKEN_BYTES reach reach_all",
    "thinwire.tools.doctor.ranks": "StoreView",
    "thinwire.tools.doctor.cross_checks": "Reports Seen cross_findings named",
    "thinwire.tools.network": "enter netns",
    "thinwire.tools.network.enter": "enter_network",
    "thinwire.tools.network.netns": (
        "Link inside interface_bytes netns_Network=Network network new_namespace parse_latency "
        "parse_rate tbf_settings why_unavailable"
    ),
    "thinwire.tools.planning": "command",
    "thinwire.tools.planning.grid": "Candidate LEFT_OUT candidates",
    "thinwire.tools.planning.loss": "law law_beta=beta loss_gap steps_to_dense_loss",
    "thinwire.tools.planning.methods": "cost_of",
    "thinwire.tools.planning.network": "FRAMES crowding network_Network=Network reduce_pairs",
    "thinwire.tools.planning.command": "plan_page=render",
    "thinwire.tools.planning.plan": "Plan",
    "thinwire.tools.planning.work": "Probe transformer work_Work=Workload",
    "thinwire.tools.report.page": "Column loss_text",
    "thinwire.tools.report.progress": "Display",
    "thinwire.tools.run": "run_command=command worker",
    "thinwire.tools.run.training": "BareStep ByClock BySteps rate_factor rehearse shortened",
    "thinwire.tools.run.built_in": "ByteTransformer ConvolutionalNet seed_of",
    "thinwire.tools.up.command": "write",
    "thinwire.tools.up.config": "UpRun=Run",
    "thinwire.tools.run.config": (
        "ConvolutionSize Job ModelSize Recipe RunConfig TaskError muon_seconds parse_size size_of"
    ),
    "thinwire.tools.run.launch": (
        "Events EventReader WorkerError failure_of free_port release run_workers"
    ),
    "thinwire.tools.run.probe": "idle_restarts probe",
    "thinwire.tools.run.command": "Prefixed Speaker",
    "thinwire.tools.run.task": "called work_of",
    "thinwire.tools.run.text": "Corpus read_digits read_folder read_standard_library",
    "thinwire.tools.run.trainers": "DDPTrainer Prepared Setup build_trainer",
    "thinwire.wire": "bucket codes",
    "thinwire.wire.bucket": "apart side_by_side",
    "thinwire.wire.whole": "read_part",
    "thinwire.wire.message": (
        "message_pack=pack message_unpack=unpack pack_nonfinite pack_whole unpack_whole"
    ),
}
"""By module its names, or `name here=name there` where two modules have the same."""
_HOMES = {
    name.partition("=")[0]: (module, name.rpartition("=")[2])
    for module, names in _NAMES.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"tests.api has no {name!r}: enter it in _NAMES")
    module, there = _HOMES[name]
    home = importlib.import_module(module)
    if hasattr(home, there):
        return getattr(home, there)
    return importlib.import_module(f"{module}.{there}")
