"""The rows of the metric catalog, as text.

A section `[view group]` holds metrics that share a chart. A group that ends in `-` is loaded only
on request, not with the page. A row is `name | unit | title`; the indented lines below it are its
description.
"""

METRIC_ROWS = """
[learning reward]
reward/total/mean | | reward, mean
    total of the reward functions (`reward.combine`), mean over the scored completions of the step
[learning reward-]
reward/total/std | | reward, standard deviation
    of the total reward over the completions of the step
reward/total/min | | reward, least
    least total reward
reward/total/max | | reward, greatest
    greatest total reward
[trust disagreement]
reward/{scorer}/disagreement | | strict and lenient disagree
    share of completions for which the strict and the lenient parser give different rewards
[learning reward]
reward/{scorer}/mean | | reward of one function
    mean over the completions that this function scored, before its weight
[learning reward_by_source]
reward/by_source/{source} | | reward of one source
    total reward, mean over the scored completions of the step's prompts from this training source;
    only where data.train has several
[learning judge_requests-]
reward/judge/requests | requests | requests to the judge
    of training and evaluation since the step before, those that were repeated included
reward/judge/failed_requests | requests | failed requests to the judge
    refused, failed, dropped, or given up at the time limit
reward/judge/requests_total | requests | requests to the judge in the run
    over all starts of the run, as reward.budget counts them
[learning judge_tokens-]
reward/judge/prompt_tokens | tokens | prompt tokens of the judge
    since the step before, as the endpoint says
reward/judge/completion_tokens | tokens | answer tokens of the judge
    since the step before, as the endpoint says
reward/judge/tokens_total | tokens | tokens of the judge in the run
    of prompts and answers, over all starts of the run, as reward.budget counts them
[learning judge_cost-]
reward/judge/cost | | cost of the judge
    since the step before, in the currency of prompt_price and completion_price
reward/judge/cost_total | | cost of the judge in the run
    over all starts of the run, as reward.budget counts it
[trust reward_errors-]
reward_error/count | | reward errors
    completions whose scoring failed or ran out of time; they are left out of the update
[trust reward_errors]
reward_error/fraction | | reward errors, share
    share of completions whose scoring failed or ran out of time
[learning accuracy]
eval/accuracy/strict | | accuracy, strict
    share of held-out completions that get at least eval/correct_from from the first scorer, by
    its strict parser if it has two
eval/accuracy/strict_low | | accuracy, strict, lower bound
    lower end of the 95 % interval (Wilson) over held-out prompts
eval/accuracy/strict_high | | accuracy, strict, upper bound
    upper end of the 95 % interval (Wilson) over held-out prompts
eval/accuracy/lenient | | accuracy, lenient
    share of held-out completions that get at least eval/correct_from from the first scorer, by
    its lenient parser if it has two
eval/accuracy/lenient_low | | accuracy, lenient, lower bound
    lower end of the 95 % interval (Wilson) over held-out prompts
eval/accuracy/lenient_high | | accuracy, lenient, upper bound
    upper end of the 95 % interval (Wilson) over held-out prompts
eval/correct_from | reward | right from
    the reward of the first scorer from which a held-out completion counts as right; without it
    there is no accuracy and no pass@k
eval/pass_at_{n} | | pass@k
    chance that at least one of k completions of a held-out prompt is right
eval/step | | evaluated step
    the step whose policy was evaluated; training may have gone on since
eval/policy_version | | evaluated policy version
    the one version under which all completions of the evaluation were sampled
eval/paired/p_value | | p of the paired test
    chance of changes as uneven as since the evaluation before, or more so, if nothing had changed:
    exact sign test over the prompts of both (McNemar's where each has one completion)
eval/paired/better | | prompts better than before
    held-out prompts with more right completions than in the evaluation before
eval/paired/worse | | prompts worse than before
    held-out prompts with fewer right completions than in the evaluation before
[learning reward]
eval/reward/total/mean | | held-out reward, mean
    total reward over the held-out completions that could be scored
eval/reward/{scorer}/mean | | held-out reward of one function
    mean over the held-out completions that this function scored, before its weight
[trust reward_errors-]
eval/reward_errors | | held-out reward errors
    held-out completions whose scoring failed; they count as wrong
[learning length]
eval/completions | | held-out completions
    how many held-out completions an evaluation scored
eval/completion_len_mean | tokens | held-out completion length, mean
    mean length of held-out completions
[learning length-]
eval/truncated_fraction | | held-out completions cut off, share
    share of held-out completions that reached the maximum length
[learning length]
rollout/completion_len_mean | tokens | completion length, mean
    mean length of the completions of the step
rollout/completion_len_max | tokens | completion length, longest
    longest completion of the step
rollout/completion_len_p50 | tokens | completion length, median
    half of the completions are shorter
rollout/completion_len_p90 | tokens | completion length, 90 %
    nine of ten completions are shorter
[learning truncated-]
rollout/tokens_beyond_half | | tokens beyond half the maximum
    share of completion tokens that lie beyond half of rollout.max_completion_tokens
[learning truncated]
rollout/truncated_fraction | | completions cut off, share
    share of completions that reached rollout.max_completion_tokens
rollout/aborted_fraction | | completions aborted, share
    share of completions that were aborted before their end
[learning tokens-]
rollout/prompt_len_mean | tokens | prompt length, mean
    mean length of the prompts of the step
rollout/environment_len_mean | tokens | tokens of the environment, mean
    tokens that the environment wrote in an episode, and those of the conversations with which
    further records begin; absent where no episode has several turns
rollout/turns_mean | turns | turns of an episode, mean
    turns of the model in an episode; absent where no episode has several turns
rollout/records_mean | records | records of an episode, mean
    sequences that an episode trains as, under environment.history=new_record; absent where each has
    one
rollout/groups | | groups
    groups of completions in the update
rollout/completions | | completions
    completions in the update
[learning sources-]
rollout/by_source/{source} | groups | groups of one source
    groups of the step, those that were replaced included, whose prompt is from this training source
[learning tokens]
rollout/tokens | tokens | completion tokens
    completion tokens that arrived in the step
[trust zero_variance]
rollout/zero_variance_fraction | | zero-variance groups, share
    share of groups whose rewards are all equal: they carry no learning signal
[trust zero_variance-]
rollout/resampled_groups | | groups resampled
    zero-variance groups for which other prompts were drawn (algorithm.zero_variance=resample)
[learning loss]
train/loss | nats | loss
    sum of token terms over one denominator; jumps are more meaningful than the level
eval/loss | nats | held-out loss
    mean of -log p over the tokens of data.eval that train; only of supervised training
[learning entropy]
train/entropy | nats | entropy
    mean entropy of the next-token distribution over the tokens in the loss
[learning entropy_coef]
train/entropy_coef | | entropy coefficient
    weight of the entropy bonus in the update; only where algorithm.entropy_target steers it
[learning kl]
train/kl | nats | KL to the reference
    mean KL divergence from the reference policy over the tokens in the loss
train/distillation_kl | nats | KL to the teacher
    mean KL divergence from the teacher over the tokens in the loss; estimated by the sampled tokens
    where algorithm.distillation.form is sampled
[learning clipping]
train/clip_fraction_low | | clipped below, share
    share of tokens whose ratio is clipped at 1 - clip_low
train/clip_fraction_high | | clipped above, share
    share of tokens whose ratio is clipped at 1 + clip_high
[learning value]
train/value_loss | reward^2 | loss of the critic
    half the squared error of its values, clipped, over the denominator of the loss; only with
    algorithm.advantage: gae
train/value_mean | reward | value, mean
    mean of the critic's values of the tokens in the loss, before the update
[learning explained_variance]
train/explained_variance | | variance explained by the critic, share
    1 - variance of (returns - values) / variance of returns over the tokens in the loss, before the
    update; 0 is as good as a constant, 1 is perfect
[learning clipping]
train/value_clip_fraction | | clipped values, share
    share of tokens whose value was held by algorithm.value_clip
[learning gradient]
train/grad_norm | | gradient norm
    global norm of the gradient before clipping
[learning learning_rate]
train/learning_rate | | learning rate
    of the update, by its schedule
[trust updates]
train/update_skipped | | update skipped
    1 if the step made no update: a number was not finite, or no group was left to train on
[learning tokens-]
train/groups | groups | groups trained
    groups of which at least one completion entered the loss
train/groups_truncated | groups | groups dropped for their length
    groups whose scored completions were all cut by length, under algorithm.truncated: mask
train/sequences | | sequences trained
    sequences that entered the loss
[learning tokens]
train/valid_tokens | tokens | tokens in the loss
    completion tokens that entered the loss
[learning tokens-]
train/input_tokens | tokens | tokens read
    prompt and completion tokens of the sequences that were trained on
[breakdown packing-]
train/microbatches | | micro-batches
    micro-batches of the update
train/padding_fraction | | padding, share
    share of the micro-batches' places that hold no token
[learning funnel]
funnel/generated | tokens | generated
    completion tokens of the groups in the update
funnel/scored | tokens | scored
    of those, tokens of completions that were scored
funnel/nonzero_advantage | tokens | non-zero advantage
    of those, tokens in the loss with an advantage that is not zero, or that a teacher trains
funnel/unclipped | tokens | unclipped
    of those, tokens whose policy term the clip does not hold constant
funnel/contributed | tokens | contributed
    of those, tokens that changed the policy: without sequences that the off-policy mask leaves out,
    and none if the update was skipped
[trust staleness]
offpolicy/staleness_mean | versions | staleness, mean
    policy versions between the one that sampled a group and the one that trains on it
offpolicy/staleness_max | versions | staleness, greatest
    never above rollout.max_staleness
[trust staleness_histogram]
offpolicy/staleness_{n} | groups | groups of this staleness
    groups of the batch that are this many versions old
[trust correction]
offpolicy/token_share_truncated | | weights truncated, tokens
    share of tokens whose importance weight was cut to algorithm.off_policy.token_truncate
[trust correction-]
offpolicy/sequence_share_truncated | | weights truncated, sequences
    share of sequences with at least one truncated weight
[trust correction]
offpolicy/token_share_masked | | masked, tokens
    share of tokens in sequences that the sequence mask left out
[trust correction-]
offpolicy/sequence_share_masked | | masked, sequences
    share of sequences that the sequence mask left out
[trust weights_raw]
offpolicy/is_weight_raw_mean | | raw token weight, mean
    importance weight of a token: its probability for the learner over that for the sampler; 1
    if both agree
offpolicy/is_weight_raw_min | | raw token weight, least
    importance weight of a token: its probability for the learner over that for the sampler; 1
    if both agree
offpolicy/is_weight_raw_max | | raw token weight, greatest
    importance weight of a token: its probability for the learner over that for the sampler; 1
    if both agree
[trust weights_kept]
offpolicy/is_weight_kept_mean | | kept token weight, mean
    importance weight of a token after truncation, of sequences not masked
offpolicy/is_weight_kept_min | | kept token weight, least
    importance weight of a token after truncation, of sequences not masked
offpolicy/is_weight_kept_max | | kept token weight, greatest
    importance weight of a token after truncation, of sequences not masked
[trust sequence_weights]
offpolicy/sequence_weight_raw_mean | | raw sequence weight, mean
    geometric mean of the token weights of a sequence
offpolicy/sequence_weight_raw_min | | raw sequence weight, least
    geometric mean of the token weights of a sequence
offpolicy/sequence_weight_raw_max | | raw sequence weight, greatest
    geometric mean of the token weights of a sequence
[trust sequence_weights-]
offpolicy/sequence_weight_kept_mean | | kept sequence weight, mean
    geometric mean of a sequence's truncated weights
offpolicy/sequence_weight_kept_min | | kept sequence weight, least
    geometric mean of a sequence's truncated weights
offpolicy/sequence_weight_kept_max | | kept sequence weight, greatest
    geometric mean of a sequence's truncated weights
[trust logprob_gap]
offpolicy/logprob_gap_mean | nats | logprob gap, mean
    distance between the learner's and the sampler's logprob of the same token
offpolicy/logprob_gap_max | nats | logprob gap, greatest
    distance between the learner's and the sampler's logprob of the same token
[trust logprob_gap-]
offpolicy/logprob_gap_sequence_mean | nats | logprob gap, sequence mean, mean
    distance between the learner's and the sampler's logprob of the same token
offpolicy/logprob_gap_sequence_max | nats | logprob gap, sequence mean, greatest
    distance between the learner's and the sampler's logprob of the same token
[trust logprob_gap_kept-]
offpolicy/logprob_gap_kept_mean | nats | kept logprob gap, mean
    the same after truncation, of sequences that are not masked
offpolicy/logprob_gap_kept_max | nats | kept logprob gap, greatest
    the same after truncation, of sequences that are not masked
offpolicy/logprob_gap_kept_sequence_mean | nats | kept logprob gap, sequence mean, mean
    the same after truncation, of sequences that are not masked
offpolicy/logprob_gap_kept_sequence_max | nats | kept logprob gap, sequence mean, greatest
    the same after truncation, of sequences that are not masked
[breakdown step_time]
time/train/step_s | s | step time
    wall time of the step, from the close of the one before it
time/train/step_avg_last10_s | s | step time, mean of ten
    mean wall time of the last ten trained steps
[breakdown sides]
time/train/rollout_generate_s | s | waited for rollouts
    how long the step waited for its groups; asynchronous runs overlap most of it
time/train/update_s | s | update time
    from the request for the update to its report
[breakdown sides-]
time/eval_s | s | evaluation time
    how long training waited for an evaluation in this step
[breakdown phases-]
time/{process}/{phase}_s | s | time of one phase
    seconds that a process spent in a phase of the ledger during the step
[breakdown background-]
time/{process}/background_{thread}_s | s | background time
    seconds in which a worker fetched weights or pushed groups in the background
[breakdown checkpoint_time-]
checkpoint/blocked_s | s | checkpoint, learner blocked
    how long the learner stood for a checkpoint: the wait for the one before and the copy of its
    state to the host; with checkpoint.asynchronous false the whole write. In the step whose update
    found it complete
checkpoint/write_s | s | checkpoint, write
    hashes, files, reading back and the removal of older ones; beside the training unless
    checkpoint.asynchronous is false. In the step whose update found it complete
[breakdown environment_calls]
environment/call_s_mean | s | call of an environment, mean
    from what the model said until the answer, waits for a process included; evaluations count
environment/call_s_max | s | call of an environment, longest
    the longest of the step
[breakdown environment_episodes]
environment/episodes_mean | episodes | episodes in flight, mean
    of all workers together, mean over the step
[breakdown environment_prompts-]
environment/prefilled_tokens | tokens | prompt tokens prefilled
    of all turns of the step, evaluation included; only with an environment
environment/reused_tokens | tokens | prompt tokens reused
    of all turns of the step, whose keys and values were kept from the turn before
[breakdown environment_calls-]
environment/calls | | calls of environments
    that have ended in the step, those that begin an episode included
[breakdown slots]
throughput/train/slot_occupancy | | share of slots in use
    tokens drawn over token steps x slots, of all workers, evaluations included; low where too few
    completions are under way, or environments are slow: see rollout.held_per_slot
[breakdown throughput]
throughput/train/decode_tokens_per_s | tokens/s | tokens decoded per second
    completion tokens over the prefill and decode seconds of the slowest worker
throughput/train/valid_tokens_per_s_update | tokens/s | tokens trained per second
    tokens in the loss over the seconds of the update
throughput/train/input_tokens_per_s_update | tokens/s | tokens read per second
    prompt and completion tokens over the seconds of the update; only of supervised training
[breakdown operations]
throughput/train/model_tflops_per_chip_update | TFLOP/s | model operations per second of a chip
    products of matrices that forward and backward pass of the trained sequences need, over the
    seconds of the update and the learner's devices; what is computed again, padding, and passes
    that only score do not count
[breakdown mfu]
throughput/train/mfu_update | | model FLOPs utilisation of the update
    these operations over the bfloat16 peak of the chip; only with learner.compute_dtype=bfloat16 on
    a chip whose peak is known
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
    refused since the start: this learner never issued their weights
[trust receipts-]
groups/duplicate | groups | groups pushed twice
    recognised since the start and counted once
[trust receipts]
groups/malformed | groups | malformed groups
    refused since the start: their contents are inconsistent
[trust stale_groups]
groups/stale | groups | groups refused as stale
    too old when they arrived, since the start
groups/dropped_stale | groups | groups dropped as stale
    grew too old in the learner's buffer, since the start
[trust leases-]
leases/done | leases | leases done
    ended with a group, since the start
[trust leases]
leases/returned | leases | leases returned
    taken from a worker or returned by it without a group, since the start
leases/expired | leases | leases lost
    lost with the worker that held them, since the start; their prompts are leased again
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
[fleet restarts-]
rollout/prompts_set_aside | prompts | prompts set aside
    that ended two workers and are leased no more, in the whole run; quarantine.json names them
[learning skipped]
rollout/prompts_skipped | | prompts skipped
    prompts that data.curriculum skips now, since the rewards of their groups were equal
rollout/groups_skipped | | groups skipped
    groups that data.curriculum has skipped in the whole run
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
    longest path of a version from the learner through other workers
[fleet pulls]
weights/failures | | weight pull failures
    sources that failed during pulls of the step; the pull continued from another source
[fleet publish-]
publish/waited_s | s | publish, waited
    how long the new version waited for the one before it
publish/copy_s | s | publish, copy
    copy of the weights from the devices to the host
[fleet pull_time]
publish/total_s | s | publish, total
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
    device memory in use at the step's end, summed over the devices of the process
mem/{process}/device_peak_bytes | bytes | device memory, peak
    peak of each device of the process since it started, summed
mem/{process}/parked_bytes | bytes | memory of parked episodes
    device memory of the episodes whose keys and values a worker keeps for their next turn, at the
    step's end; only with an environment
[fleet parked-]
mem/{process}/parked_episodes | episodes | parked episodes
    episodes whose keys and values a worker keeps for their next turn, at the step's end
"""
