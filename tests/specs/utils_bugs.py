"""Planted bugs of utils/, edits that change nothing, and the fast tests that guard each file of utils/."""

from tests.specs import parse_bugs

TESTS = {  # as Spec.tests
    "utils/checks.py": "checks",
    "utils/checkpoint.py": "resume runs",
    "utils/cli.py": "runs command_line memory",
    "utils/control.py": "envs exact_ppo exact_sac parity_sb3 properties::test_replay_buffer",
    "utils/core.py": "resume_control command_line_control envs",
    "utils/decode.py": "invariance",
    "utils/distributed.py": "distributed",
    "utils/engine.py": "engine",
    "utils/evaluation.py": "exact_grpo runs rewards",
    "utils/head.py": "invariance properties exact_grpo distributed",
    "utils/lm.py": "exact_grpo parity_trl invariance sft exact_dpo runs architectures distributed",
    "utils/lora.py": "lora",
    "utils/memory.py": "memory",
    "utils/models.py": "exact_grpo parity_trl invariance sft exact_dpo lora checks runs distributed",
    "utils/offline.py": "offline_data exact_iql exact_dt collection",
    "utils/preferences.py": "preferences unpaired parity_trl_dpo dpo_runs",
    "utils/reward_models.py": "reward_models exact_reward_model",
    "utils/rewards.py": "rewards runs reward_models distributed",
    "utils/run.py": "runs memory resume::test_killed_at_any_moment resume::test_a_kill_while_the_reference_is_computed",
    "utils/schedule.py": "exact_grpo runs",
    "utils/single.py": "eject::test_a_copy_for_one_process_leaves_torchrun_out",
    "utils/rows.py": "tasks text large_data preferences properties",
    "utils/tasks.py": "tasks sft preferences runs",
    "utils/text.py": "text tasks sft preferences unpaired reward_models runs",
    "utils/turns.py": "exact_multiturn",
}
BUGS = parse_bugs("""
metrics-behind-the-checkpoint-stay: the file is opened to append, and rows stand there twice after a resume
- self.metrics.truncate(self.state.get("metrics_size", 0))
+ self.metrics.truncate(self.metrics.seek(0, 2))

global-generators-not-restored: the generators that a script holds are restored, and the others forgotten
- set_rng_state(self.state["rng"])
+ self.state["rng"]

saved-at-multiples-only: an iteration is more than one step, and few end at a multiple
- return every > 0 and step // every > before // every
+ return every > 0 and step % every == 0

resumed-vector-begins-as-before: a seed is given once, and the same episodes come again
- envs.reset(seed=seed_of(args.seed, step))
+ envs.reset(seed=seed_of(args.seed))

observation-overwritten:vector: a vector that copies nothing returns its own memory
- obs, true_obs, episodes = obs.copy(), obs, []
+ obs, true_obs, episodes = obs, obs, []

final-observation-overwritten: an environment resets into the array that it returned
- obs = obs.copy() if terminated or truncated else obs
+ pass

returns-run-on: sums over episodes are set back where one ends
- envs.returns[i] = envs.lengths[i] = 0
+ envs.lengths[i] = 0

evaluation-moves-the-training: environments draw from the global generators
-     set_rng_state(before)
-     return returns, lengths, success
+     return returns, lengths, success

eos-written-twice: the template writes a whole conversation, and part of it was sampled
-         before = before.removeprefix(written[0]) if written else before
+         pass

groups-with-different-games: each episode has a seed of its own (RAGEN seeds by group)
- rows[i // group], random.Random(f"{key}/{i // group}").getrandbits(32)
+ rows[i // group], random.Random(f"{key}/{i}").getrandbits(32)

hung-calls-go-on: a thread that wakes up goes on with its list
-             if left_behind.is_set():
+             if False:

mean-of-shards: FSDP averages unless it is told otherwise
- module.set_gradient_divide_factor(1.0)

gradients-of-one-rank: nothing fails where ranks drift apart
- for work in [dist.all_reduce(p.grad, async_op=True) for p in used]:
+ for work in []:

padding-counts: a pass that is only there to keep step is trained on
- ((items[0], False) for _ in
+ ((items[0], True) for _ in

no-padding: ranks with fewer passes leave the others waiting
- if is_sharded(model):
-         yield from
+ if False:
+         yield from

gathered-in-the-order-of-ranks: what comes first is not what was asked first
- join([parts[i] for i in sorted(parts)])
+ join(list(parts.values()))

batches-counted-by-each-rank: a count of one's own is at hand, the place in the step is not
- stream(model.device, *key, first + i)
+ stream(model.device, *key, len(parts))

trained-while-gathered: what stands in the module between two passes is not what is trained
-     at_rest(model)
-     return [p for
+     return [p for

head-ends-the-pass: a hook of FSDP takes the first chunk of logits for the end
- layer.forward(hidden) if sharded else layer(hidden)
+ layer(hidden)

every-rank-scores-the-first-share: an offset is forgotten
- (len(starts) * k // world() for k in (rank(), rank() + 1))
+ (len(starts) * k // world() for k in (0, 1))

moments-forgotten: weights come back, Adam's moments do not
- optimizer.load_state_dict({"state": kept, "param_groups": groups})
+ optimizer.load_state_dict({"state": {}, "param_groups": groups})

skipped-reward-is-zero:utils: a sum that skips NaN is 0 where all are NaN
-         total[table.isnan().all(1)] = torch.nan

cut-off-is-rewarded: a penalty is subtracted here and added there
- rewards=scored.rewards - penalty * ~ended.cpu()
+ rewards=scored.rewards + penalty * ~ended.cpu()

ended-is-punished: the mask says who ended, the name says who did not
- rewards=scored.rewards - penalty * ~ended.cpu()
+ rewards=scored.rewards - penalty * ended.cpu()

async-one-by-one: await stands in a loop more often than not
- return await asyncio.gather(*map(result, values))
+ return [await result(value) for value in values]

reward-weights-ignored: a setting that is checked, printed, and not used (modelscope/ms-swift#9925 and #10167: a loss
type that was silently ignored)
- total = (table * weight).nansum(1)
+ total = table.nansum(1)

groups-interleaved:lm: repeat and repeat_interleave give the same shape
- out.logits.repeat_interleave(repeats, 0)
+ out.logits.repeat(repeats, 1, 1)

prompt-shared-by-recurrences: a cache that can be repeated is taken for one that can be gone on from
- not is_sharded(model) and shares_cache(model):
+ not is_sharded(model):

train-mode-not-tried: the one way is tried that works
- model.train(mode), *inputs
+ model.eval(), *inputs

temperature-multiplies: an inverse temperature is a habit of physics; at 1 nothing shows
- scaled if temperature == 1 else scaled.div_(temperature)
+ scaled if temperature == 1 else scaled.mul_(temperature)

eos-not-trained: the length of the text is taken for that of the completion: models then never learn to stop
(huggingface/trl#6357: GKD and GOLD masked the real EOS)
- torch.where(ends_now, t + 1, lengths
+ torch.where(ends_now, t, lengths

padding-by-id: the id of padding is taken for padding, also where the model says it (tiny-grpo train.py:108,
simple_GRPO:80, rlhf-book rollout.py:139 mask by the id of padding)
- completion_mask = torch.arange(length, device=device) < lengths[:, None]
+ completion_mask = ids[:, :length] != 0

trained-behind-eos: generation returns a rectangle, and nothing says where each row ended (huggingface/trl#2387: PPO
never stopped at EOS)
- completion_mask = torch.arange(length, device=device) < lengths[:, None]
+ completion_mask = torch.ones_like(ids[:, :length], dtype=torch.bool)

one-eos-of-several: tokenizers know one EOS, chat models end their turns with another (huggingface/trl#1623, #3091,
#5303, #7039)
- return sorted({tokenizer.eos_token_id, *more} - {None})
+ return [tokenizer.eos_token_id]

positions-count-padding: models number positions themselves where none are given, padding included
(huggingface/trl#469 and #6800, OpenRLHF#217 and #238)
- return (mask.long().cumsum(1) - 1).clamp(min=0)
+ return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)

padding-attended: without a mask nothing fails, and the shortest prompts suffer
- out = model(input_ids=prompt_ids, attention_mask=prompt_mask.long()
+ out = model(input_ids=prompt_ids, attention_mask=torch.ones_like(prompt_ids)

shifted-by-one: logits at a token predict the next: tokens are shifted once too often or not at all
- rest, _ = body(input_ids=completion_ids[:, :-1]
+ rest, _ = body(input_ids=completion_ids[:, 1:]

decoding-position-off-by-one: the number of tokens so far is taken for the index of the next
- position_ids=position + t,
+ position_ids=position + t + 1,

hidden-states-off-by-one: the hidden state of a token is taken for the one that predicts it
- hidden[rows, starts[rows, 0] - 1 + tokens]
+ hidden[rows, starts[rows, 0] + tokens]

static-rows-keep-their-mask: rows leave the batch, and the mask stays as it was
- self.start(self.open[rows], self.position[rows], self.column)
+ self.start(self.open[: len(rows)], self.position[rows], self.column)

last-chunk-only: a gradient replaces the one before it
- grad if so_far is None else so_far.add_(grad)
+ grad

gradients-of-chunks-in-bfloat16: what comes from a bfloat16 product is added as it is
- [grad if grad.dtype == torch.float64 else grad.float() for grad in grads]
+ [grad.bfloat16() for grad in grads]

stream-without-its-key: a generator with the seed of the run is at hand
- digest = hashlib.blake2b(repr(key).encode()
+ digest = hashlib.blake2b(repr(key[:1]).encode()

sampled-from-the-top: samplers for users cut the tail off; what scores does not (nanochat (top-k 50), rlhf-book (top-p
0.95, top-k 20) score by the full softmax)
- (logp.exp() / noise).argmax
+ (logp.exp() * (logp >= logp.topk(3)[0][:, -1:]) / noise).argmax

dropout-in-sampling: answers are sampled in the middle of training, where the model is in training mode
-     model.eval()
-     cache, logits
+     cache, logits

training-mode-lost: eval() before an evaluation, and no train() after it
-     model.train(training)
-     length = int(lengths.max())
+     length = int(lengths.max())

bfloat16-weights: models are published in bfloat16, in which AdamW's small steps round away
- torch.bfloat16 if frozen or precision == "pure-bfloat16" else
+ torch.bfloat16 if frozen or precision != "float32" else

frozen-weights-cast-for-every-token: float32 is what is trained, and nobody looks at what is not
- frozen = lora_rank > 0 and precision != "float32"
+ frozen = False

unfinished-work-taken-for-a-checkpoint: what is saved before the first step is a checkpoint at step 0 like any other
- self.save(0, state | {"early": True})
+ self.save(0, state)

merged-in-bfloat16: merging is one call, in whatever the base is held
- own = own.to("cpu", torch.float32).merge_and_unload()
+ own = own.merge_and_unload()

experts-without-adapters: "all-linear" is taken for all; fused experts are parameters, not layers
- if not lora_modules and (routers or experts):
+ if not lora_modules and routers:

eos-not-trained:tasks: a tokenizer without special tokens brings no EOS
- return tokens[start:end] + (tokens[end : end + 1] or [tokenizer.eos_token_id])
+ return tokens[start:end] or [tokenizer.eos_token_id]

prompt-trained: labels are a copy of the inputs
- return prompt[:cut], *ends
+ return prompt[:1], *(until_eos(whole, 1, tokenizer, eos) for whole in wholes)

several-turns-cut-at-the-first-eos: an answer has one EOS as long as it is one message
- if isinstance(answer, list) and [message["role"] for message in answer] != ["assistant"]:
+ if isinstance(answer, list) and not answer:

shared-turns-stay-in-the-answers: prompt is given, so it is taken for all that both have in common
- size = shared_prefix(chosen, rejected)
+ size = 0 if isinstance(prompt, list) else shared_prefix(chosen, rejected)

prompt-twice: chosen and rejected may repeat what stands in the column prompt
- if begin[0]["role"] == "assistant":
+ if True:

names-of-other-rows: Arrow writes None for what a row lacks, and a template writes null
- Row({name: without_none(x) if is_structs(x) else x for name, x in table[i].items()}, f"row {i} of {of}")
+ Row(table[i], f"row {i} of {of}")

held-out-by-another-task: each file holds out for itself
- held = {key for task in loaded.values() for key in keys_of(task.heldout)}
+ held = set()

rendered-text-gets-a-second-bos: tokenizers do not look at what a text begins with
- ids[1:] if twice else ids
+ ids

tools-dropped: a column that a reward function would get, and the template does not ask for
- ({"tools": tools} if tools else {})
+ {}

one-segment: input ids look like all that a model takes
- ((ends.cumsum(1) - ends).clamp(max=1) * mask).long()
+ torch.zeros_like(ids)

terminal-last-row-lost: the row after the last one is not there, but who needs it
- known[-1] &= terminals[-1] > 0
+ known[-1] = False

second-bos: tokenizers add special tokens unless they are told not to (huggingface/trl#1073, #1591, #1885, #4908;
OpenRLHF#393; axolotl#1616)
- return encode_text(prompt + answer, row, tokenizer)
+ return encode_text(prompt, row, tokenizer) + encode_text(answer, row, tokenizer)

no-generation-prompt: templates end without the assistant's header unless they are told to write it
- add_generation_prompt=not continued
+ add_generation_prompt=False

prefill-gets-a-second-header: prompts end with a user's message in all examples
- continued = prompt[-1]["role"] == "assistant"
+ continued = False

heldout-in-training: small spaces of problems repeat themselves
- lambda i, seed: draw(random.Random(f"{name}/{seed}/{i}"), False)
+ lambda i, seed: make(random.Random(f"{name}/{seed}/{i}"))[0]

heldout-in-training:splits: a test split is trusted to be one
-         train = without(set(others), *sound(train, spec), spec)
+         train = sound(train, spec)[0]

prompt-trained:likelihoods: labels are a copy of the inputs (ORPO's authors and TRL's ORPO trainer have the prompt in
the likelihood)
- return prompt, *(completion[: max_length - len(prompt)] for completion in completions)
+ return prompt[:1], *(prompt[1:] + completion[: max_length - len(prompt)] for completion in completions)

same-order-every-epoch: a generator that is made anew in every epoch
- random.Random(f"{seed}/{epoch}")
+ random.Random(f"{seed}")

numbers-left-over: the target is reached, and nobody asks which numbers were used: models find out
- float(left == [row["target"]])
+ float(row["target"] in left)

heldout-in-training:envs: one seed for everything: evaluation starts where training started
- seed_of(seed, 2**31, i % (starts or episodes))
+ seed_of(seed, i % (starts or episodes))

images-reshaped: channels last and channels first hold as many numbers
- lambda obs: np.moveaxis(obs, 2, 0)
+ lambda obs: obs.reshape(moved.shape)

no-bootstrap-at-truncation:envs: one flag `done` of the old interface: time limits look like failures
- return obs, true_obs, rewards, terminated, truncated, episodes
+ return obs, true_obs, rewards, terminated | truncated, truncated, episodes

next-observation-of-the-reset:envs: the last observation matters where the episode was cut off, and is asked for where
- true_obs[i] = envs.infos["final_obs"][i]
+ true_obs[i] = obs[i]

stepped-beyond-the-episode: vectors go on after the first episode
- for i in running.nonzero()[0]:
+ for i in range(episodes):

a-success-is-forgotten: only the last step is looked at, and many tasks go on after a success
- success[i] = np.fmax(success[i], float(info.get("success", info.get("is_success", np.nan))))
+ success[i] = float(info.get("success", info.get("is_success", np.nan)))

wrappers-left-out: a name and arguments look like a whole environment
- key in known & spec.keys()}
+ key in known & spec.keys() - {"additional_wrappers"}}

evaluated-where-it-was-recorded: two specifications in one file, of which the first is always there
- about.get("eval_env_spec") or about.get("env_spec") or
+ about.get("env_spec") or

cut-off-trajectory-kept: the end of a file looks like an end of an episode
- cut_off, ends[-1] = not ends[-1], True
+ cut_off, ends[-1] = False, True

score-of-another-environment: what was recorded belongs to the environment of the recording
- (data.env_id, data.env_kwargs) != (args.env_id, args.env_kwargs)
+ data.env_id is None

evaluated-once-only: a number of steps that is right for long runs is longer than a short one
- min(max(total // 5, 1), args.longest_gap)
+ args.longest_gap

environments-all-alike: one seed for all environments of a vector
- obs = envs.reset(seed=seed_of(args.seed, step))[0].copy()
+ obs = envs.reset(seed=[seed_of(args.seed, step)] * args.num_envs)[0].copy()

labels-swapped:data: datasets differ in which column or index is the preferred one
- return row | {"chosen": right, "rejected": wrong}
+ return row | {"chosen": wrong, "rejected": right}

labels-swapped:unpaired: a label may say that a completion is good or that it is harmful
- sides = (("chosen", True), ("rejected", False))
+ sides = (("chosen", False), ("rejected", True))

variance-of-a-sample-of-members:utils: NumPy's default is ddof 0, torch's 1
- scores.var(0, correction=0)
+ scores.var(0)

deviation-for-variance: the deviation is what has the units of a score
- scores.var(0, correction=0)
+ scores.std(0, correction=0)

disagreement-rewarded: a bonus for the unknown is what explores
- return scores.mean(0) - weight *
+ return scores.mean(0) + weight *

best-case-for-worst-case: rewards are maximised
- return scores.amin(0)
+ return scores.amax(0)

one-member-for-all: the first of a list stands for all: the ensemble then is one model
- for member in self.members]
+ for member in self.members[:1] * len(self.members)]

eos-not-scored: the text of an answer has no EOS, and scores were learnt there (TRL's online trainers score text
without EOS)
- return tokens[:start] + until_eos(tokens, start, tokenizer, [tokenizer.eos_token_id])
+ return tokens[:start] + until_eos(tokens, start, tokenizer, [tokenizer.eos_token_id])[:-1]

answer-scored-alone: the answer is what is judged; which prompt it answers is not asked
- return tokens[:start] + until_eos(tokens, start, tokenizer, [tokenizer.eos_token_id])
+ return until_eos(tokens, start, tokenizer, [tokenizer.eos_token_id])

answer-scored-alone:chat: the answer is what is judged; which prompt it answers is not asked
- return render(prompt + messages, row, tokenizer)
+ return render(messages, row, tokenizer)

settings-of-the-row-last: the command line goes before the file everywhere else
- return settings_of(tokenizer).template_kwargs | ({"tools": tools} if tools else {}) | without_none(own)
+ return ({"tools": tools} if tools else {}) | without_none(own) | settings_of(tokenizer).template_kwargs

completion-encoded-alone: a text is encoded where it is at hand; SentencePiece puts a space before every text
- return encode_text(prompt + answer, row, tokenizer)
+ return encode_text(prompt, row, tokenizer) + tokenizer(answer, add_special_tokens=False)["input_ids"]

long-prompts-stay: they are counted and told of, which looks like all that is to do
- return len(prompt) <= limit
+ return True

long-prompts-stay:heldout: evaluation samples, too
- return replace(task, train=epochs(train), heldout=list(heldout), rows=train)
+ return replace(task, train=epochs(train), rows=train)

seam-of-each-answer-alone: pairs are two rows of one kind; the prompt of one then is not that of the other
- cut = min(shared(prompt, whole) for whole in wholes)
+ cut = max(shared(prompt, whole) for whole in wholes)

prompt-of-another-row: groups of one prompt are scored together, until there are several
- for row, text in zip(rows, texts)]
+ for row, text in zip(rows[:1] * len(rows), texts)]

scores-in-the-order-of-lengths: sorted to save padding, and not put back
- sequences = [encode_answer(row, text, self.tokenizer) for row, text in zip(rows, texts)]
+ sequences = sorted((encode_answer(row, text, self.tokenizer) for row, text in zip(rows, texts)), key=len)

score-read-before-eos: padding with EOS is a habit of generation; pooling then looks for the last token that is not
EOS
- if i is not None and i != tokenizer.eos_token_id]
+ if i is not None]

score-read-at-padding: padding is masked anyway; pooling goes by its id
- width, pad = max(map(len, sequences)), model.config.get_text_config().pad_token_id
+ width, pad = max(map(len, sequences)), 0

score-read-at-the-first-token: encoders have a token for it in front; in a decoder the first token has seen nothing
- scores = model(input_ids=ids, attention_mask=mask, **more).logits[:, 0]
+ scores = model(input_ids=ids[:, :1], attention_mask=mask[:, :1]).logits[:, 0]

padding-attended:reward_models: decoders do not see padding on the right; encoders do
- [[1] * len(s) + [0] * (width - len(s)) for s in sequences]
+ [[1] * width for s in sequences]

mask-of-the-other-side: prompts are padded on the left, whole texts on the right
- [s + [pad] * (width - len(s)) for s in sequences]
+ [[pad] * (width - len(s)) + s for s in sequences]

schedule-off-by-one: steps count from 1 here and from 0 there; the last step then has a rate of 0
- done = (step - 1 - warmup_steps)
+ done = (step - warmup_steps)

warm-up-begins-at-zero: steps count from 1 here and from 0 there; the first step is then lost
- return base * step / warmup_steps
+ return base * (step - 1) / warmup_steps

no-bootstrap-at-truncation:offline: datasets have terminals, timeouts and ends of trajectories
(Farama-Foundation/D4RL#162: time-outs mislabelled)
- terminals > 0, np.roll(
+ ends, np.roll(

next-observation-of-the-reset:offline: the row after is the next observation but for the last row of a trajectory
-         data.next_obs[ends] = last

variance-without-the-means: variances of batches are averaged, and that between their means is forgotten
- (self.var * self.count + squares + delta * delta * (self.count * rows / total)) / total
+ (self.var * self.count + squares) / total

bounds-taken-as-symmetric: in MuJoCo most bounds are -1 and 1
- stretched = space.low + (actions.reshape(-1, *space.shape) + 1) / 2 * (space.high - space.low)
+ stretched = actions.reshape(-1, *space.shape) * space.high

rows-that-were-never-written: buffers are allocated whole
- held = min(self.total, self.capacity)
-         index
+ held = self.capacity
+         index

evaluation-with-training-noise: one sampler for both
- in scores(1, 0.0)],
+ in scores(1, temperature)],

evaluation-moves-the-training-noise: one generator for everything: how often one evaluates changes what is learnt
- set_rng_state(before)
+ pass

evaluation-on-the-global-generator: a generator is an argument that may be left out
- stream(model.device, *key, first + i))
+ None)

biased-pass-at-k: the obvious formula is biased (arXiv 2107.03374, section 2.1)
- return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
+ return 1.0 - (1.0 - correct / n) ** k

generator-not-restored:global: the global generators belong to nobody
- set_rng_state(state["rng"])
+ pass

rows-twice-after-a-resume: logs are appended to
-         self.metrics.truncate(size)

checkpoints-sorted-as-text: step-9 comes after step-10: the newest is not the newest
- (len(path.name), path.name)
+ path.name.lstrip("step-0")

one-moment-of-two: an optimizer that holds as much as the weights
- "Adam": 2 * trained
+ "Adam": trained

reference-beside-adapters: with LoRA the policy without its adapters is the reference
- if reference and args.beta and not args.lora_rank else 0
+ if reference and args.beta else 0

chunk-without-its-gradients: logits are held more than once
- "bfloat16": (10, 12)}
+ "bfloat16": (4, 0)}

saved-tensors-tied-to-their-graph: hooks that return the tensor that they were given (torch's own documentation warns)
-             kept[storage.data_ptr()] = storage
+             kept[storage.data_ptr()] = storage
+             return tensor

resume-with-the-memory-that-was-too-little:run: the sentence that names flags which --resume then refuses
- LOGGING_FLAGS + MEMORY_FLAGS +
+ LOGGING_FLAGS +

engine-keeps-a-view: on a CPU in float32 `.to` gives the tensor itself, which goes on with training
- self.dtype, copy=True)
+ self.dtype)

engine-never-perturbed: the start is said to be proven, with the weights that the server had
- samples = probe(perturbed)
+ samples = probe(true)

engine-stale-unnoticed: the rule is worked out and nobody asks
- server.check_share(server.ways, "older weights")
+ sure(server.ways)

engine-fixed-limit: a limit that suits the first model; of one step it sees nothing
- distance(part, score, rows), FAR * max(server.noise, ROUNDING))
+ distance(part, score, rows), 0.2)

engine-tied-head-as-one: two layers of one weight are taken for one, and a server may hold two
- layer.weight = torch.nn.Parameter(old[name].to(p.device, p.dtype))
+ layer.weight = p

engine-eos-dropped: the text has no EOS, and its tokens are taken to have none
- found = [(one["token_ids"], one["logprobs"]["token_logprobs"]) for one in choices]
+ found = [(one["token_ids"][:-1], one["logprobs"]["token_logprobs"][:-1]) for one in choices]

engine-temperature-left-out: the server's own default is taken
- min_tokens=0, temperature=temperature, top_p=1.0,
+ min_tokens=0, top_p=1.0,

engine-top-k-left-out: a model's generation settings fill it in (Qwen2.5: top_k 20)
- top_k=0, min_p=0.0,
+ min_p=0.0,

passages-without-a-shared-word: a ranking always has as many as were asked for
- if score > 0]
+ ]

processes-of-processes-live-on: the child itself is dead
- os.killpg(child.pid, signal.SIGKILL)
+ child.kill()

hidden-methods-are-tools: what a class keeps for itself begins with an underscore
- if name[0] != "_" and name not in ("reset", "get_reward")]
+ if name[:2] != "__" and name not in ("reset", "get_reward")]

signs-are-punctuation: SQuAD's rule drops all punctuation, and so takes 3 for -3
- (?!(?<![^\\W\\d_])[-.]\\d|(?<=\\d)/\\d)[
+ [

runs-of-any-script: their arguments often have the same names
- if script is not None and script != algo:
+ if False:

rewards-add-up-twice: get_reward says what the whole episode is worth so far
- reward, self.paid = total - self.paid, total
+ reward, self.paid = total, total

groups-begin-unlike: each episode of a group draws its own start
- random.seed(seed)
+ random.seed()

reset-moves-the-global-stream: the run's own draws then depend on the environment
- random.setstate(before)
+ pass

engine-one-seed: vLLM seeds each prompt of a request alike, and completion j as seed + j
- "seed": seed + i * num_samples,
+ "seed": seed,

engine-order-of-arrival: completions of a prompt come as they end
- choices = sorted(server.ask("/v1/completions", body)["choices"], key=lambda one: one["index"])
+ choices = server.ask("/v1/completions", body)["choices"]

engine-own-eos-ends: the server's EOS is not the run's where --eos-token says another
- ignore_eos=True, stop_token_ids=eos
+ ignore_eos=False, stop_token_ids=eos

engine-cut-silently: vLLM shortens what does not fit, without a word
- if longest > least.room:
+ if longest > 2 * least.room:

engine-raw-logprobs: without the temperature, where the mode is the default
- if config["logprobs_mode"] != "processed_logprobs":
+ if config["logprobs_mode"] is None:

engine-scored-at-one: the server divides by the temperature, the scorer does not
- completion_logps(model, *prompts, *completions, temperature)
+ completion_logps(model, *prompts, *completions)

engine-weights-not-put-back: the run goes on from perturbed weights
-             p.data = own.get(name, p.data)
+             p.data = p.data

engine-loaded-once: the weights of the start are sampled from for ever
- if not self.now or any(not torch.equal(weights[name], self.now[name]) for name in weights):
+ if not self.now:

engine-first-server-compared: where a batch has fewer prompts than there are servers, it is always the same one's
- self.drawn, self.turn = None, self.turn + 1
+ self.drawn = None

engine-adapter-in-place: the name stays, and vLLM reads what is loaded in place again for each token
- server.name = Path(path).name
+ server.name = "adapter"

engine-whole-step-is-half: any share below 1 is taken for old, which noise alone can be
- if gone.sum() < whole.sum() / 2 and sure(whole - gone):
+ if gone.sum() < whole.sum() / 2:

engine-large-steps-first: nats are added up, and those of the start are a thousand times those of a step
- found[rows] / unit
+ found[rows]

engine-noise-of-one: one completion decides, whatever the others say
- values.sum() > Z * values.square().sum().sqrt()
+ values.sum() > Z * values.square().mean().sqrt()

evaluated-by-one-rank: FSDP gathers in advance what it guesses from the passes so far, and ranks have run others
-             module.set_modules_to_backward_prefetch([before] if before else [])

gathered-twice: FSDP gathers tied weights for each of the two layers
-         root.tie_weights()
+         pass

engine-one-server-loaded: of several, the first
-             for server in self.servers:
-                 config
+             for server in self.servers[:1]:
+                 config
""")
SAME = parse_bugs("""
same:rename-ratio
- unclipped, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
-     return -torch.min(unclipped, clipped), clipped < unclipped
+ plain, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
+     return -torch.min(plain, clipped), clipped < plain

same:rename-inputs-of-critics
- both = torch.cat([obs, actions], -1)
-         return self.q1(both), self.q2(both)
+ inputs = torch.cat([obs, actions], -1)
+         return self.q1(inputs), self.q2(inputs)

same:exp-as-function
- ratio = (logps - old_logps).exp()
+ ratio = torch.exp(logps - old_logps)

same:k3-by-expm1
- difference.exp() - difference - 1
+ difference.expm1() - difference

same:leave-one-out-as-one-fraction
- (rewards - (rewards.nansum(1, keepdim=True) - rewards) / others)
+ ((rewards * (others + 1) - rewards.nansum(1, keepdim=True)) / others)

same:whiten-by-square-root
- (values - kept.mean()) * (kept.var() + 1e-8).rsqrt()
+ (values - kept.mean()) / (kept.var() + 1e-8).sqrt()

same:terms-of-dpo
- return -(1 - e) * logsigmoid(logits) - e * logsigmoid(-logits)
+ return -(e * logsigmoid(-logits) + (1 - e) * logsigmoid(logits))

same:factors-of-sft
- -(logps * mask).sum() / total
+ (-logps * mask).sum() / total

same:terms-of-delta
- rewards + gamma * next_values * ~terminated - values
+ rewards - values + gamma * next_values * ~terminated

same:order-of-the-min
- torch.min(ratio * advantages, clipped * advantages)
+ torch.minimum(clipped * advantages, ratio * advantages)

same:independent-lines-of-ppo
-         old_logps, _, values = agent(batch.obs, batch.actions)
-         next_values = agent.value(batch.next_obs)
+         next_values = agent.value(batch.next_obs)
+         old_logps, _, values = agent(batch.obs, batch.actions)

same:division-of-pixels
- .float() / 255
+ .float().div(255)

same:one-mean-of-two-errors
- 0.5 * (q - target).square().mean((1, 2)).sum()
+ (q - target).square().mean((1, 2)).sum() / 2

same:sign-of-the-temperature-inside
- -(log_alpha.exp() * (logps + target_entropy)).mean()
+ (-log_alpha.exp() * (logps + target_entropy)).mean()

same:expectile-by-absolute-value
- torch.where(errors > 0, expectile, 1 - expectile)
+ (expectile - (errors < 0).to(errors.dtype)).abs()

same:negated-likelihood
- -actor.log_prob(batch.obs, batch.actions).mean()
+ actor.log_prob(batch.obs, batch.actions).neg().mean()

same:mean-of-real-steps
- (errors * batch.mask).sum() / batch.mask.sum()
+ errors[batch.mask].mean()

same:cosine-by-half-angles
- (1 + math.cos(math.pi * done)) / 2
+ math.cos(math.pi * done / 2) ** 2

same:independent-lines-of-statistics
-         self.mean = self.mean + delta * (rows / total)
-         self.count = total
+         self.count = total
+         self.mean = self.mean + delta * (rows / total)

same:positions-by-sub
- (mask.long().cumsum(1) - 1).clamp(min=0)
+ mask.long().cumsum(1).sub(1).clamp_min(0)

same:rows-held
- held = min(self.total, self.capacity)
-         index
+ held = self.total if self.total < self.capacity else self.capacity
+         index

same:target-margin-over-beta
- args.beta * (chosen - rejected) - args.gamma
+ args.beta * (chosen - rejected - args.gamma / args.beta)

same:beta-inside-both-branches
- args.beta * torch.where(labels, ratios - z, z - ratios)
+ torch.where(labels, args.beta * (ratios - z), args.beta * (z - ratios))

same:worst-case-by-min
- scores.amin(0)
+ scores.min(0).values

same:sign-before-nan
- (first - second).nan_to_num(0.0).sign()
+ (first - second).sign().nan_to_num(0.0)
""")
