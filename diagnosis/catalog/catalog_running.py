"""Rows of the metric catalog: where the time and the memory of a run go.

A section `[view group]` holds metrics that share a chart; one whose group ends in `-` is shown
where it is asked for, and not loaded with the page. A row is `name | unit | title`; the lines that
are indented under it describe it.
"""

RUNNING_ROWS = """
[breakdown step_time]
time/train/step_s | s | step time
    wall time of the step, from the close of the one before it
time/train/step_avg_last10_s | s | step time, mean of ten
    mean wall time of the last ten trained steps
[breakdown sides]
time/train/rollout_generate_s | s | waited for rollouts
    how long the step waited for its groups; asynchronous runs hide most of it
time/train/update_s | s | update time
    from the request for the update to its report
[breakdown sides-]
time/eval_s | s | evaluation time
    how long the step's evaluation took
[breakdown phases-]
time/{process}/{phase}_s | s | time of one phase
    seconds that a process spent in a phase of the ledger during the step
[breakdown background-]
time/{process}/background_{thread}_s | s | background time
    seconds in which a worker fetched weights or pushed groups beside its loop
[breakdown throughput]
throughput/train/decode_tokens_per_s | tokens/s | tokens decoded per second
    completion tokens over the prefill and decode seconds of the slowest worker
throughput/train/valid_tokens_per_s_update | tokens/s | tokens trained per second
    tokens in the loss over the seconds of the update
[timeline queue]
queue/waiting_mean | groups | groups waiting, mean
    groups that the learner holds and has not trained on, mean over the step
queue/waiting_max | groups | groups waiting, most
    groups that the learner holds and has not trained on, most in the step
queue/out_mean | groups | groups with workers, mean
    groups leased to workers, mean over the step
queue/out_max | groups | groups with workers, most
    groups leased to workers, most in the step
[trust receipts]
groups/unknown_receipt | groups | groups of an unknown receipt
    refused since the start: their weights were none that this learner had issued
[trust receipts-]
groups/duplicate | groups | groups pushed twice
    recognised since the start and counted once
[trust receipts]
groups/malformed | groups | malformed groups
    refused since the start: their contents do not fit together
[trust stale_groups]
groups/stale | groups | groups refused as stale
    too old when they arrived, since the start
groups/dropped_stale | groups | groups dropped as stale
    grew too old in the learner's buffer, since the start
[trust leases-]
leases/done | leases | leases done
    ended with a group, since the start
[trust leases]
leases/returned | leases | leases given back
    taken from a worker or given back by it without a group, since the start
leases/expired | leases | leases lost
    lost with the worker that held them, since the start; their prompts are given out again
[trust leases-]
leases/out | leases | leases out
    held by workers at the step's end
[trust canary]
canary/gap_max | nats | canary gap, greatest
    greatest distance between a worker's logprobs of a fixed text and the learner's, over the
    versions that arrived in the step
[fleet restarts]
workers/restarts | | worker restarts
    since the start
learner/restarts | | learner restarts
    since the start
[fleet pulls-]
weights/pulls | | weight pulls
    versions that workers pulled in the step
[fleet pulls]
weights/wire_bytes | bytes | weight bytes on the wire
    bytes that workers received for the versions pulled in the step
[fleet pulls-]
weights/version_bytes | bytes | weight bytes in full
    size of those versions without deltas
weights/delta_fraction | | pulls as deltas, share
    share of pulls that were made from the version before
[fleet pull_time]
weights/pull_s_max | s | weight pull, slowest
    slowest pull of a version in the step
[fleet weight_rate]
weights/gb_per_s | GB/s | weight pull rate
    bytes on the wire over the seconds of the pulls
[fleet pulls-]
weights/relay_depth_max | hops | weight relay depth
    longest way of a version from the learner over other workers
[fleet pulls]
weights/failures | | weight pull failures
    sources that failed during pulls of the step; the pull went on from another
[fleet publish-]
publish/waited_s | s | publish, waited
    how long the new version waited for the one before it
publish/copy_s | s | publish, copy
    copy of the weights from the devices to the host
[fleet pull_time]
publish/total_s | s | publish, in all
    from the end of the update until workers could pull the version
[fleet weight_rate]
publish/gb_per_s | GB/s | publish rate
    bytes of the version over the seconds of its copy
[fleet memory-]
mem/peak_bytes_in_use_max | bytes | learner's device memory, peak
    greatest peak over the learner's devices since it started
[fleet host_memory]
mem/{process}/host_bytes | bytes | host memory
    resident memory of the process at the step's end
[fleet device_memory]
mem/{process}/device_bytes | bytes | device memory
    device memory in use at the step's end, of all devices of the process together
mem/{process}/device_peak_bytes | bytes | device memory, peak
    the most that was in use on each device of the process since it started, added up
"""
