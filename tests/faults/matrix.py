"""The faults that training has to stand, and where each of them is made.

python -m tests.faults            # makes all, and writes the table of tests/faults/outcomes.md
python -m tests.faults 7 17 27    # some, and writes nothing
"""

from dataclasses import dataclass

__all__ = ["MATRIX", "Row"]


@dataclass(frozen=True)
class Row:
    """One kind of fault.

    Attributes:
        number: From 1.
        part: Which part of the system it befalls.
        fault: What is done.
        criterion: What must hold then.
        tests: Files and functions under tests/, all of which make it; empty where none does.
        why: What of the fault is not made, or not held, and why; empty for nothing.
    """

    number: int
    part: str
    fault: str
    criterion: str
    tests: tuple[str, ...]
    why: str = ""


INJECTED = "faults/test_injected.py::"
LINES = "faults/test_lines.py::"
GROUP = "comm/test_group.py::"
DGC = "optim/test_dgc_momentum.py::"
MEMBERS = "members/test_rounds.py::"
BETWEEN = "test_a_rank_killed_between_two_buckets_leaves_the_others_unchanged"
AT_EVERY_POINT = INJECTED + "test_a_rank_is_killed_at_every_point_of_a_step"
ATOMIC = "an error on the others at once; parameters and state as before the step"

PROCESS, NETWORK, NUMBERS = "processes", "network", "numbers"
WIRE, DISAGREEMENT, CHECKPOINT, LOCAL = "wire", "disagreement", "checkpoints", "local updates"


def _numbered(rows: list[tuple[str, str, str, tuple[str, ...], str]]) -> list[Row]:
    return [Row(number, *row) for number, row in enumerate(rows, 1)]


MATRIX = _numbered(
    [
        (
            PROCESS,
            "SIGKILL in the middle of an exchange",
            ATOMIC,
            (AT_EVERY_POINT, GROUP + "test_a_killed_rank_is_lost_on_the_others"),
            "",
        ),
        (
            PROCESS,
            "SIGKILL of the rank that hosts the store",
            ATOMIC,
            (INJECTED + "test_the_rank_that_hosts_the_store_is_killed",),
            "",
        ),
        (
            PROCESS,
            "SIGKILL between two buckets of a backward pass",
            ATOMIC,
            (AT_EVERY_POINT,),
            "",
        ),
        (
            PROCESS,
            "SIGKILL once all is sent, before it is applied",
            "the others apply the step, say so, and hold the same",
            (AT_EVERY_POINT,),
            "",
        ),
        (
            PROCESS,
            "SIGKILL at random moments, and a restart by torchrun",
            "ends with the bits of the run that nobody disturbed",
            ("field/test_restarts.py::test_killed_and_started_again_it_ends_as_undisturbed",),
            "",
        ),
        (
            PROCESS,
            "SIGTERM to torchrun (preemption)",
            "all ranks save the same step and end; resumed, the bits of an undisturbed run",
            (
                "faults/test_launcher.py::"
                "test_a_job_that_is_told_to_end_goes_on_later_as_if_it_had_not_been",
            ),
            "the script does it (docs/resume.md); the library catches no signal",
        ),
        (
            PROCESS,
            "SIGSTOP for longer than the time-out",
            "PeerStalled on all others within 2 s after it, naming the rank",
            (
                GROUP + "test_a_stopped_rank_is_named_by_all_others",
                "comm/test_cut_off.py::test_another_rank_is_stopped",
            ),
            "",
        ),
        (
            PROCESS,
            "SIGSTOP for 2 s",
            "the bits of the run that nobody disturbed",
            (INJECTED + "test_a_rank_stops_for_less_than_the_time_out",),
            "a line in the log from 10 s on, no warning",
        ),
        (
            PROCESS,
            "the kernel ends a rank for want of memory",
            ATOMIC,
            ("faults/test_strangers.py::test_the_kernel_ends_a_rank_that_takes_too_much_memory",),
            "",
        ),
        (
            PROCESS,
            "segmentation fault",
            ATOMIC,
            (INJECTED + "test_a_rank_ends_otherwise",),
            "",
        ),
        (
            PROCESS,
            "an exception on one rank: in its backward pass, forward pass, or update",
            "its own error there, an error on all others in time",
            (
                INJECTED + "test_a_rank_raises",
                "strategy/test_overlap.py::"
                "test_an_error_in_the_backward_pass_of_one_rank_is_told_to_all_who_then_go_on",
            ),
            "the others hear the cause once messages have left; else PeerStalled",
        ),
        (
            PROCESS,
            "the interpreter's lock held for twice the time-out",
            "PeerStalled on all others, naming the rank",
            (INJECTED + "test_a_rank_holds_the_lock_of_the_interpreter_for_twice_the_time_out",),
            "",
        ),
        (
            PROCESS,
            "a rank ends quietly, with status 0",
            ATOMIC,
            (INJECTED + "test_a_rank_ends_otherwise",),
            "",
        ),
        (
            PROCESS,
            "SIGKILL of torchrun",
            "no worker is left after 5 s",
            ("faults/test_launcher.py::test_no_worker_outlives_a_launcher_that_was_killed",),
            "one line of the script does it (docs/resume.md); without it workers go on",
        ),
        (
            PROCESS,
            "one of two torchrun agents goes for good",
            "the other goes on alone from the checkpoint, and says what was lost",
            (
                "field/test_lost_machine.py::test_the_other_machine_goes_on_alone_and_says_what_was_lost",
            ),
            "",
        ),
        (
            PROCESS,
            "survivors go on without a restart",
            "members make the averaging again; the same bits on all",
            (
                MEMBERS + "test_whoever_is_killed_the_others_make_the_round_again",
                "comm/test_cut_off.py::"
                "test_a_new_process_group_trains_on_in_the_same_processes_once_the_network_is_back",
            ),
            "local updates only; other methods restart",
        ),
        (
            NETWORK,
            "a line is cut for good",
            "PeerStalled on all ranks within 2 s after the time-out, the one that is cut off too",
            ("comm/test_cut_off.py::test_the_network_of_a_rank_is_cut",),
            "",
        ),
        (
            NETWORK,
            "a line is down for 3 s",
            "the bits of the run that nobody disturbed",
            (LINES + "test_a_line_is_down_for_less_than_the_time_out",),
            "",
        ),
        (
            NETWORK,
            "1 Gbit/s becomes 20 Mbit/s",
            "training goes on; bytes_sent is within 5 % of what the interface counts",
            (
                LINES + "test_a_line_becomes_fifty_times_slower_and_the_bytes_"
                "that_are_told_are_those_on_the_wire",
            ),
            "",
        ),
        (
            NETWORK,
            "one slow line among fast ones",
            "its pairs are slow in the probe's table",
            ("planning/test_probe.py::test_every_pair_and_every_gradient_is_measured",),
            "`thinwire probe` names it; training itself does not",
        ),
        (
            NETWORK,
            "50 ms one way",
            "a step takes as many round trips as it has buckets, and two",
            (LINES + "test_a_step_over_a_late_line_takes_as_many_round_trips_as_it_has_exchanges",),
            "",
        ),
        (
            NETWORK,
            "1 % of the packets lost",
            "the bits of the run that nobody disturbed",
            (LINES + "test_every_hundredth_packet_is_lost",),
            "",
        ),
        (
            NETWORK,
            "all connections of a rank reset in mid-transfer",
            "an error of the library's on all ranks; state as before the step",
            (INJECTED + "test_all_connections_of_a_rank_are_reset",),
            "",
        ),
        (
            NETWORK,
            "nobody at the meeting point, at the start or later",
            "an error with host and port, at most 2 s after the time-out",
            (
                "members/test_meeting.py::test_where_nobody_listens",
                "faults/test_meeting_cut.py::test_the_line_is_cut_before_anybody_joins",
                "faults/test_meeting_cut.py::test_the_line_is_cut_before_a_run_is_entered",
                "faults/test_meeting_cut.py::test_the_line_is_cut_while_a_joiner_waits",
                "faults/test_meeting_cut.py::test_rounds_go_on_without_the_meeting_place_and_the_"
                "next_loss_ends_the_run_in_time",
                "doctor/test_command.py::test_a_rank_that_meets_nobody_says_so_in_time",
            ),
            "`init_process_group` of torch is not ours; `thinwire doctor` says what is wrong there",
        ),
        (
            NETWORK,
            "a rank comes too late",
            "an error on the others in time",
            (
                GROUP + "test_a_rank_that_does_not_come_to_the_making_of_the_group_is_told_apart",
                GROUP + "test_every_group_keeps_the_time_out_that_it_was_given",
            ),
            "",
        ),
        (
            NETWORK,
            "random bytes at the ports of gloo and of the store",
            "the bits of the run that nobody disturbed",
            ("faults/test_strangers.py::test_random_bytes_at_every_port_change_nothing",),
            "",
        ),
        (
            NETWORK,
            "two halves without a way between them",
            "neither goes on",
            (
                LINES + "test_two_halves_without_a_way_between_them_both_stop",
                LINES + "test_two_halves_that_part_in_mid_step_both_stop",
                MEMBERS + "test_half_of_them_cannot_go_on",
            ),
            "",
        ),
        (
            NUMBERS,
            "NaN in one rank's gradient",
            "all ranks drop the step; residual and momentum stay finite",
            (
                "laws/test_matrix.py::"
                "test_a_gradient_that_is_not_finite_on_one_rank_drops_the_step_on_all",
            ),
            "",
        ),
        (
            NUMBERS,
            "an overflow under a loss scale",
            "all ranks drop the step and halve the scale once",
            (
                "strategy/test_engine.py::test_an_overflow_on_one_rank_drops_the_step_on_all",
                "test_amp.py::test_an_overflow_on_one_rank_drops_the_step_on_all",
            ),
            "",
        ),
        (
            NUMBERS,
            "values beyond what the wire's numbers hold",
            "they saturate, or the step is dropped on all ranks",
            (
                "core/test_value_code.py::test_doubles_beyond_float32_saturate_or_vanish",
                "sync/test_digest.py::test_finite_gradients_whose_sum_is_not_drop_the_step",
            ),
            "nothing travels as float16: values are coded with a scale of their own",
        ),
        (
            NUMBERS,
            "overflow in every step",
            "an error on all ranks at the tenth in a row",
            ("test_amp.py::test_endless_overflow_is_an_error_on_every_rank",),
            "",
        ),
        (
            NUMBERS,
            "zero gradients, none, empty and scalar parameters",
            "as the dense reference",
            (
                DGC + "test_shapes_of_all_kinds",
                DGC + "test_zeros_are_not_sent_and_nothing_moves",
                DGC + "test_no_gradient_on_any_rank_is_a_step_that_changes_nothing",
            ),
            "",
        ),
        (
            NUMBERS,
            "residuals that grow",
            "sent plus kept is what was accumulated",
            ("sync/test_split.py::test_nothing_is_lost_over_50_steps",),
            "no warning is given for a large residual",
        ),
        (
            NUMBERS,
            "ties at the threshold of a selection",
            "the lowest positions, on every rank and in every run",
            ("core/test_select.py::test_selection_is_exact_and_takes_the_lowest_of_equal_ones",),
            "",
        ),
        (
            WIRE,
            "one bit flipped in a message",
            "all of 10,000 are found; PayloadCorrupt on all ranks, naming the source",
            (
                "core/test_message.py::test_ten_thousand_single_bit_flips_are_all_found",
                "sync/test_round.py::test_a_damaged_message_is_refused_by_name_on_every_rank",
                INJECTED + "test_a_bit_that_flips_in_the_header_of_an_agreement_is_refused_at_once",
                "sync/test_digest.py::test_a_bit_that_flips_in_a_dense_sum_is_found_before_it_is_applied",
            ),
            "a large dense sum that is wrong on all ranks alike is not found (docs/reliability.md)",
        ),
        (
            WIRE,
            "cut, long and forged messages; messages of another step",
            "refused, and no read or write out of bounds",
            (
                "core/test_message.py::test_any_payload_with_a_fitting_checksum_is_refused_or_is_legal",
                "core/test_message.py::test_a_message_of_another_length_is_refused",
                "core/test_index_code.py::test_any_bytes_are_refused_or_are_what_the_oracle_reads",
                "sync/test_round.py::test_a_message_of_another_step_is_refused",
            ),
            "",
        ),
        (
            WIRE,
            "another version of the wire format on one rank",
            "Mismatch on all ranks before the first message",
            (
                "faults/test_versions.py::test_another_wire_version_on_one_rank_is_a_mismatch_on_all",
            ),
            "",
        ),
        (
            DISAGREEMENT,
            "another setting on one rank",
            "Mismatch on all ranks, naming the field and both values",
            (
                "strategy/test_engine.py::test_disagreement_is_an_error_on_every_rank",
                DGC + "test_ranks_that_disagree_are_told_before_anything_moves",
            ),
            "",
        ),
        (
            DISAGREEMENT,
            "another order of the parameters",
            "Mismatch on all ranks, naming the first",
            (DGC + "test_ranks_that_disagree_are_told_before_anything_moves",),
            "",
        ),
        (
            DISAGREEMENT,
            "another shape, dtype, number of parameters, or requires_grad",
            "the same Mismatch on all ranks",
            (DGC + "test_ranks_that_disagree_are_told_before_anything_moves",),
            "",
        ),
        (
            DISAGREEMENT,
            "other initial values",
            "those of rank 0 on all, or a Mismatch",
            (
                "comm/test_replicate.py::test_only_what_differs_travels",
                DGC + "test_ranks_that_disagree_are_told_before_anything_moves",
            ),
            "",
        ),
        (
            DISAGREEMENT,
            "collectives of the user in between",
            "results of the library are not touched",
            (GROUP + "test_user_collectives_do_not_meet_ours",),
            "",
        ),
        (
            DISAGREEMENT,
            "a parameter that one rank does not use",
            "Mismatch on all ranks, naming parameter and rank",
            (
                "strategy/test_overlap.py::"
                "test_a_parameter_unused_on_one_rank_is_a_mismatch_on_all_and_training_goes_on",
                DGC + "test_a_gradient_on_some_ranks_only_is_an_error_on_all",
            ),
            "",
        ),
        (
            DISAGREEMENT,
            "unequal numbers of batches",
            "`engine.join`, or an error that names it",
            (
                "strategy/test_unequal_data.py::test_ranks_that_ran_out_count_with_zero",
                "strategy/test_unequal_data.py::test_a_flush_after_unequal_numbers_of_batches_is_an_error_with_advice_on_all",
            ),
            "",
        ),
        (
            DISAGREEMENT,
            "another build of torch on one rank",
            "one warning in each process",
            ("strategy/test_alike.py::test_another_build_of_torch_is_a_warning_and_no_error",),
            "",
        ),
        (
            DISAGREEMENT,
            "a wrong number of ranks, or a rank twice",
            "an error where no rank is left for a process; nobody trains in a wrong job",
            (
                "faults/test_numbers.py::test_a_wrong_number_of_ranks_ends_all",
                "faults/test_numbers.py::test_of_two_with_the_same_rank_one_trains",
            ),
            "it is torch's `init_process_group` that says so, after up to six time-outs, and names "
            "no numbers; members have none to get wrong",
        ),
        (
            DISAGREEMENT,
            "DDP makes other buckets after the first step",
            "the numbers of one bucket",
            ("laws/test_dgc.py::test_attached_or_not_the_numbers_are_the_same",),
            "",
        ),
        (
            DISAGREEMENT,
            "a second hook, a hook on another model, DDP's own join",
            "refused, saying what to use",
            (
                DGC + "test_attaching_wrongly_is_refused",
                DGC + "test_ddps_own_join_is_refused_while_attached",
            ),
            "`static_graph` works; torch's `python_reducer` is not looked for",
        ),
        (
            CHECKPOINT,
            "SIGKILL at every operation of a save",
            "the old or the new state loads, never a mixture",
            ("checkpoint/test_kills.py::test_what_loads_after_a_kill_is_the_old_or_the_new_state",),
            "",
        ),
        (
            CHECKPOINT,
            "a full disk",
            "the same error on all ranks; what was written is removed; the next save works",
            (
                "checkpoint/test_disks.py::test_a_full_and_a_read_only_disk",
                "checkpoint/test_ranks.py::"
                "test_a_failure_on_one_rank_is_an_error_on_all_and_training_goes_on",
            ),
            "",
        ),
        (
            CHECKPOINT,
            "bits flipped, files cut or missing",
            "all are found; the checkpoint before is loaded, with a warning",
            (
                "checkpoint/test_damage.py::test_every_flipped_bit_is_found",
                "checkpoint/test_damage.py::test_every_truncation_and_anything_added_is_found",
                "checkpoint/test_damage.py::"
                "test_the_one_before_is_loaded_with_a_warning_that_names_the_file",
            ),
            "",
        ),
        (
            CHECKPOINT,
            "hostile files",
            "nothing is executed",
            (
                "checkpoint/test_damage.py::test_nothing_here_can_execute_what_it_reads",
                "checkpoint/test_damage.py::test_a_hostile_manifest_is_refused",
                "checkpoint/test_damage.py::test_a_hostile_tree_is_refused",
                "checkpoint/test_damage.py::test_a_hostile_tensor_file_is_refused",
            ),
            "",
        ),
        (
            CHECKPOINT,
            "a directory that is read-only, vanishes or hangs",
            "the same error on all ranks, in time",
            (
                "checkpoint/test_disks.py::test_a_directory_that_vanishes_during_a_save",
                "checkpoint/test_ranks.py::"
                "test_a_disk_that_hangs_is_an_error_on_all_within_the_time_out",
            ),
            "",
        ),
        (
            CHECKPOINT,
            "4 to 2 to 4 ranks",
            "the update still pending is kept",
            (
                "strategy/test_resume.py::test_four_ranks_to_two_to_four_keep_the_update_still_pending",
            ),
            "",
        ),
        (
            CHECKPOINT,
            "another method, or a newer format",
            "an error that names all that differs",
            (
                "strategy/test_saving.py::"
                "test_settings_that_touch_state_are_named_with_both_values_and_the_way_on",
                "checkpoint/test_damage.py::"
                "test_a_newer_format_is_an_error_and_no_older_state_takes_its_place",
            ),
            "no older format has been released",
        ),
        (
            CHECKPOINT,
            "two saves at once",
            "never torn",
            ("checkpoint/test_kills.py::test_what_loads_after_a_kill_is_the_old_or_the_new_state",),
            "a save ends before the call returns, so there is one at a time",
        ),
        (
            LOCAL,
            "a rank dies between two averagings; a joiner; a stage of a pipeline dies",
            "at most the work of one round of that rank is lost; the others hold the same",
            (
                AT_EVERY_POINT,
                MEMBERS + "test_a_joiner_has_the_bits_of_the_others",
                MEMBERS + "test_every_method_goes_on_without_a_member_that_was_killed",
                "local/test_laws.py::test_the_interval_follows_loss_and_rate",
                "pipeline/test_runner.py::test_the_others_raise_when_a_stage_is_gone",
            ),
            "",
        ),
    ]
)
