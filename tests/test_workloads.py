"""Programs as users write them see no promise broken (S1, S2, S3, S5, S6), and see each that a mutant breaks."""

from __future__ import annotations

import json

from amount import SEED, share
from test_front_programs import run


def test_workloads_keep_the_promises_of_the_documents_s1_s2_s3_s5_s6():
    status, said = run("workloads.py", "--seed", 1 + SEED, "--rounds", share(20))
    assert status == 0, said
    ended = [json.loads(line) for line in said]
    assert len(ended) >= 8
    assert {one["rounds"] for one in ended} == {share(20)}


FOUND = {
    "tensor_parallel_layer": "a_wait_on_any_stream_releases",
    "megatron_ddp": "the_end_of_a_region_holds_its_first_tensor_alone",
    "fsdp_by_events": "a_synchronous_call_makes_no_handoff",
    "fsdp_by_record_stream": "record_stream_holds_nothing",
    "pipeline_1f1b": "a_batch_holds_nothing_of_its_second_operation",
    "moe_dispatch": "a_call_holds_its_first_storage_alone",
    "second_group_on_a_third_stream": "a_synchronous_call_makes_no_handoff",
    "decode_by_graphs": "the_last_replay_of_a_graph_is_forgotten",
    "arena_by_turns": "slots_go_to_other_streams_as_they_are",
    "dropped_handles": "a_dropped_handle_releases_at_once",
    "gloo_beside_nccl": "a_work_of_the_general_way_is_not_held",
}
"""A mutant that each workload finds."""


def test_each_workload_finds_a_safecomm_that_is_wrong_and_one_what_is_never_released_s3():
    """That memory is lost is found as well, and is no Violation."""
    lost = "moe_dispatch:handoffs_are_never_released"
    status, said = run("workloads.py", "--seed", 1, "--rounds", 10, *map(":".join, FOUND.items()), lost)
    *found, last = map(json.loads, said)
    assert status == 1
    assert {one["workload"]: one["by"] for one in found} == dict.fromkeys(FOUND, "Violation")
    assert "blocks are lost" in last["reason"]
