"""Planted bugs of utils/ and of from_trl.py, edits that change nothing, and the fast tests that guard each file."""

from tests.specs import parse_bugs

TESTS = {  # as Spec.tests
    "algos/environments/from_trl.py": "tools",
    "utils/control.py": "envs exact_ppo exact_sac parity_sb3 properties::test_replay_buffer",
    "utils/core.py": "faults::test_a_resume_or_evaluation_that_fails_leaves_the_run "
                     "faults::test_a_run_of_another_version resume_control command_line_control envs runs "
                     "properties::test_crosses",
    "utils/builtin.py": "tasks text properties preferences sft",
    "utils/data.py": "tasks text large_data preferences unpaired properties sft reward_models",
    "utils/dist.py": "distributed exact_grpo exact_dpo invariance alarm lora "
                     "wiring::test_each_batch_is_sampled_with_numbers_of_its_own",
    "utils/lm.py": "exact_grpo parity_trl invariance lora alarm architectures engine distributed "
                   "rewards::test_evaluation_leaves_no_trace",
    "utils/vllm.py": "engine",
    "utils/offline.py": "offline_data exact_iql exact_dt collection",
    "utils/rewards.py": "rewards reward_models exact_reward_model runs distributed",
}  # fmt: skip
BUGS = parse_bugs("""
metrics-behind-the-checkpoint-stay: the file is opened to append, and rows stand there twice after a resume
- self.metrics.seek(self.metrics.truncate(self.kept))
+ self.metrics.seek(0, 2)

resumed-rows-before-the-load: the folder is made where the run is, as a new one's is
- self.print(f"run folder: {self.dir}"
+ self.open() or self.print(f"run folder: {self.dir}"

ended-runs-go-on: nothing is left to do, and all is written again
- if (done := self.state["step"]) > total or done == total and (self.dir / "curve.png").exists():
+ if (done := self.state["step"]) > total:

worst-trajectories: sorting ascends
- np.argsort(-self.trajectory_returns()
+ np.argsort(self.trajectory_returns()

fraction-of-trajectories: 10 %-BC is of steps in the paper's code; of trajectories it is other data (CORL's 10 %-BC)
- np.cumsum(self.lengths()[best_first]) < fraction * len(self.obs)
+ np.arange(len(best_first)) < fraction * len(best_first)

unknown-arguments-are-dropped: what is unknown cannot have mattered
- if lost := {name: saved[name] for name in gone if saved[name] != moved.get(name, ("", then.get(name)))[1]}:
+ if lost := {}:

moved-arguments-are-dropped: a flag that another script has today is lost without a word
- if lost := {name: saved[name] for name in gone if saved[name] != moved.get(name, ("", then.get(name)))[1]}:
+ if lost := {name: saved[name] for name in gone - moved.keys() if saved[name] != then.get(name)}:

other-weights-trained: loading is not strict, for a checkpoint lacks the frozen ones
- if other := (own.items() - saved.items()) |
+ if other := set() and (own.items() - saved.items()) |

fingerprint-of-shapes: models of one architecture have the same
- p.detach().flatten()[:: p.numel() // 64 + 1]
+ p.detach().flatten()[:0]

adapters-of-a-tied-head: peft takes any linear layer that is named
- if last is not None and first.weight is last.weight:
+ if first is last:

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
- cast, came = np.array(obs, space.dtype),
+ cast, came = np.asarray(obs, space.dtype),

returns-run-on: sums over episodes are set back where one ends
- envs.returns[i] = envs.lengths[i] = 0
+ envs.lengths[i] = 0

evaluation-moves-the-training: environments draw from the global generators
-     set_rng_state(before)
-     return returns, lengths, success
+     return returns, lengths, success

mean-of-shards: FSDP averages unless it is told otherwise
-         part.set_gradient_divide_factor(1.0)

gradients-of-one-rank: nothing fails where processes drift apart
- for work in [dist.all_reduce(p.grad, async_op=True) for p in trained]:
+ for work in []:

padding-counts: a pass that is only there to keep step is trained on
- yield within[:0].to(ids.device), (one
+ yield within[:1].to(ids.device), (one

no-padding: processes with fewer passes leave the others waiting
- return batches + [[]] * (most - len(batches))
+ return batches

batches-counted-by-each-rank: seed and step are the same in all processes, which then draw alike for their prompts
- repr((*key, rank()))
+ repr(key)

head-ends-the-pass: a hook of FSDP takes the first chunk of logits for the end
- model.get_output_embeddings().forward(hidden)
+ model.get_output_embeddings()(hidden)

moments-forgotten: weights come back, Adam's moments do not
- optim_state_dict=state["optimizer"])
+ optim_state_dict=self.state_dict()["optimizer"])

skipped-reward-is-zero:utils: a sum that skips NaN is 0 where all are NaN
- .nansum(1).masked_fill(table.isnan().all(1), math.nan)
+ .nansum(1)

async-one-by-one: await stands in a loop more often than not
- return await asyncio.gather(*map(result, values))
+ return [await result(value) for value in values]

reward-weights-ignored: a setting that is checked, printed, and not used (modelscope/ms-swift#9925 and #10167: a loss
type that was silently ignored)
- weighted = table * weights
+ weighted = table * 1.0

groups-interleaved:lm: repeat and repeat_interleave give the same shape
- group = torch.arange(rows, device=device) // num_samples
+ group = torch.arange(rows, device=device) % len(prompt_ids)

temperature-multiplies: an inverse temperature is a habit of physics; at 1 nothing shows
- .div_(temperature)
+ .mul_(temperature)

eos-not-trained: the length of the text is taken for that of the completion: models then never learn to stop
(huggingface/trl#6357: GKD and GOLD masked the real EOS)
- torch.where(ends_now, t + 1, lengths
+ torch.where(ends_now, t, lengths

padding-by-id: the id of padding is taken for padding, also where the model says it (tiny-grpo train.py:108,
simple_GRPO:80, rlhf-book rollout.py:139 mask by the id of padding)
- completion_mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
+ completion_mask = ids != 0

padding-by-id:given: the id of padding is taken for padding, also where the data hold it
-     mask = torch.arange(ids.shape[1], device=device) < lengths.minimum(room)[:, None]
+     mask = ids != 0

cut-completions-end: what was cut off is counted as if it had ended
- torch.zeros(ids.shape, device=device), lengths <= room)
+ torch.zeros(ids.shape, device=device), lengths > 0)

cut-tokens-count: lengths are taken before the end is cut off
- < lengths.minimum(room)[:, None]
+ < lengths[:, None]

trained-behind-eos: generation returns a rectangle, and nothing says where each row ended (huggingface/trl#2387: PPO
never stopped at EOS)
- completion_mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
+ completion_mask = torch.ones_like(ids, dtype=torch.bool)

one-eos-of-several: tokenizers know one EOS, chat models end their turns with another (huggingface/trl#1623, #3091,
#5303, #7039)
- ends = {tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}
+ ends = {tokenizer.eos_token_id}

positions-count-padding: models number positions themselves where none are given, padding included
(huggingface/trl#469 and #6800, OpenRLHF#217 and #238)
- return (mask.long().cumsum(1) - 1).clamp(min=0)
+ return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)

padding-attended: without a mask nothing fails, and the shortest prompts suffer
- out = model(input_ids=prompt_ids, attention_mask=prompt_mask.long()
+ out = model(input_ids=prompt_ids, attention_mask=torch.ones_like(prompt_ids)

shifted-by-one: logits at a token predict the next: tokens are shifted once too often or not at all
- input_ids=completion_ids[:, :-1]
+ input_ids=completion_ids[:, 1:]

decoding-position-off-by-one: the number of tokens so far is taken for the index of the next
- position_ids=position + t,
+ position_ids=position + t + 1,

hidden-states-off-by-one: the hidden state of a token is taken for the one that predicts it
- hidden[rows, starts[rows, 0] - 1 + tokens]
+ hidden[rows, starts[rows, 0] + tokens]

last-chunk-only: a gradient replaces the one before it
- [amount.add_(grad) for amount, grad
+ [grad for amount, grad

gradients-of-chunks-in-bfloat16: what comes from a bfloat16 product is added as it is
- dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights]
+ dtype=torch.bfloat16) for w in weights]

stream-without-its-key: a generator with the seed of the run is at hand
- repr((*key, rank()))
+ repr((key[0], rank()))

sampled-from-the-top: samplers for users cut the tail off; what scores does not (nanochat (top-k 50), rlhf-book (top-p
0.95, top-k 20) score by the full softmax)
- (logp.exp() / noise).argmax
+ (logp.exp() * (logp >= logp.topk(3)[0][:, -1:]) / noise).argmax

dropout-in-sampling: answers are sampled in the middle of training, where the model is in training mode
-     model.eval()
-     out
+     out

training-mode-lost: eval() before an evaluation, and no train() after it
-     model.train(training)
-     ids
+     ids

bfloat16-weights: models are published in bfloat16, in which AdamW's small steps round away
- return args.precision == "pure-bfloat16" or
+ return args.precision != "float32" or

frozen-weights-cast-for-every-token: float32 is what is trained, and nobody looks at what is not
- bool(frozen or args.lora_rank) and args.precision != "float32"
+ False

merged-in-bfloat16: merging is one call, in whatever the base is held
- .to("cpu", torch.float32).merge_and_unload()
+ .merge_and_unload()

eos-not-trained:tasks: a tokenizer without special tokens brings no EOS
- return tokens[:end] + (tokens[end : end + 1] or [tokenizer.eos_token_id])
+ return tokens[:end] or [tokenizer.eos_token_id]

prompt-trained: labels are a copy of the inputs
- return prompt[:cut], *ends
+ return prompt[:1], *(until_eos(whole[1:], tokenizer, eos) for whole in wholes)

several-turns-cut-at-the-first-eos: an answer has one EOS as long as it is one message
- last = answer[0] if [message["role"] for message in answer] == ["assistant"] else {}
+ last = answer[0]

shared-turns-stay-in-the-answers: prompt is given, so it is taken for all that both have in common
- size = min(shared(said(chosen), said(rejected))
+ size = len(prompt) if isinstance(prompt, list) else min(shared(said(chosen), said(rejected))

prompt-twice: chosen and rejected may repeat what stands in the column prompt
- return begin + answer[again:]
+ return begin + answer

names-of-other-rows: Arrow writes None for what a row lacks, and a template writes null
- return bare(value) if arrow else value
+ return value

rendered-text-gets-a-second-bos: tokenizers do not look at what a text begins with
- return ids[1:] if plain and ids[:2] == [tokenizer.bos_token_id] * 2 else ids
+ return ids

tools-dropped: a column that a reward function would get, and the template does not ask for
- ({"tools": tools} if tools else {})
+ {}

terminal-last-row-lost: the row after the last one is not there, but who needs it
- known[-1] &= terminals[-1] > 0
+ known[-1] = False

second-bos: tokenizers add special tokens unless they are told not to (huggingface/trl#1073, #1591, #1885, #4908;
OpenRLHF#393; axolotl#1616)
- ids = tokenizer(text, add_special_tokens=plain)["input_ids"]
+ ids = [i for x in (row["prompt"], answer) if x for i in tokenizer(x)["input_ids"]]

no-generation-prompt: templates end without the assistant's header unless they are told to write it
- add_generation_prompt=not begun
+ add_generation_prompt=False

prefill-gets-a-second-header: prompts end with a user's message in all examples
- begun = prompt[-1]["role"] == "assistant"
+ begun = False

heldout-in-training: small spaces of problems repeat themselves
- lambda i, seed: draw(random.Random(f"{name}/{seed}/{i}"), False)
+ lambda i, seed: make(random.Random(f"{name}/{seed}/{i}"))[0]

heldout-in-training:splits: a test split is trusted to be one
- held = set(others)
+ held = set()

same-order-every-epoch: a generator that is made anew in every epoch
- random.Random(f"{seed}/{epoch}")
+ random.Random(f"{seed}")

numbers-left-over: the target is reached, and nobody asks which numbers were used: models find out
- float(left == [row["target"]])
+ float(row["target"] in left)

heldout-in-training:envs: one seed for everything: evaluation starts where training started
- seed_of(seed, 2**31, i % (starts or episodes))
+ seed_of(seed, i % (starts or episodes))

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
- success[i] = np.fmax(success[i], number(info.get("success", info.get("is_success"))))
+ success[i] = number(info.get("success", info.get("is_success")))

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
- args.eval_every = min(max(total // 5, 1), 50_000)
+ args.eval_every = 50_000

environments-all-alike: one seed for all environments of a vector
- obs = envs.reset(seed=seed_of(args.seed, step))[0].copy()
+ obs = envs.reset(seed=[seed_of(args.seed, step)] * args.num_envs)[0].copy()

labels-swapped:data: datasets differ in which column or index is the preferred one
- yield row | {"chosen": right, "rejected": wrong}
+ yield row | {"chosen": wrong, "rejected": right}

variance-of-a-sample-of-members:utils: NumPy's default is ddof 0, torch's 1
- raw.std(1, correction=0)
+ raw.std(1)

variance-for-deviation:ensemble: ensembles of the paper subtract the variance; it has not the units of a score
- raw.std(1, correction=0)
+ raw.var(1, correction=0)

disagreement-rewarded: a bonus for the unknown is what explores
- raw.mean(1) - raw.std
+ raw.mean(1) + raw.std

best-case-for-worst-case: rewards are maximised
- raw.amin(1)
+ raw.amax(1)

one-member-for-all: the first of a list stands for all: the ensemble then is one model
- raw = table[:, models]
+ raw = table[:, models[:1]]

weights-before-the-least: a score times its weight is at hand, and a negative weight makes the least the most
- raw = table[:, models]
+ raw = weighted[:, models]

functions-lost-beside-models: the combined score is taken for the whole reward
- weighted[:, models] = 0.0
+ weighted[:] = 0.0

eos-not-scored: the text of an answer has no EOS, and scores were learnt there (TRL's online trainers score text
without EOS)
- return ids[:start] + until_eos(ids[start:], tokenizer, [tokenizer.eos_token_id])
+ return ids[:start] + until_eos(ids[start:], tokenizer, [tokenizer.eos_token_id])[:-1]

answer-scored-alone: the answer is what is judged; which prompt it answers is not asked
- return ids[:start] + until_eos(ids[start:]
+ return until_eos(ids[start:]

answer-scored-alone:chat: the answer is what is judged; which prompt it answers is not asked
- prompt = prompt + answer
+ prompt = answer

settings-of-the-row-last: the command line goes before the file everywhere else
- return getattr(tokenizer, "template_kwargs", {}) | ({"tools": tools} if tools else {}) | own
+ return ({"tools": tools} if tools else {}) | own | getattr(tokenizer, "template_kwargs", {})

completion-encoded-alone: a text is encoded where it is at hand; SentencePiece puts a space before every text
- ids = tokenizer(text, add_special_tokens=plain)["input_ids"]
+ ids = tokenizer(text.removesuffix(str(answer)))["input_ids"] + tokenizer(answer or "", False)["input_ids"]

long-prompts-stay: they are counted and told of, which looks like all that is to do
- (length := len(encode(row)[0])) > limit:
+ (length := len(encode(row)[0])) > math.inf:

long-prompts-stay:heldout: evaluation samples, too
- return task._replace(rows=rows, train=epochs(rows), heldout=heldout)
+ return task._replace(rows=rows, train=epochs(rows))

seam-of-each-answer-alone: pairs are two rows of one kind; the prompt of one then is not that of the other
- cut, ends = min(shared(
+ cut, ends = max(shared(

prompt-of-another-row: groups of one prompt are scored together, until there are several
- ids = [encode_scored(row, text, self.tokenizer) for row, text in zip(rows, texts)]
+ ids = [encode_scored(rows[0], text, self.tokenizer) for row, text in zip(rows, texts)]

scores-in-the-order-of-lengths: sorted to save padding, and not put back
- ids = [encode_scored(row, text, self.tokenizer) for row, text in zip(rows, texts)]
+ ids = sorted((encode_scored(row, text, self.tokenizer) for row, text in zip(rows, texts)), key=len)

score-read-before-eos: padding with EOS is a habit of generation; pooling then looks for the last token that is not
EOS
- if i not in (None, tokenizer.eos_token_id)
+ if i is not None

score-read-at-padding: padding is masked anyway; pooling goes by its id
- width, pad = max(map(len, sequences)), model.config.get_text_config().pad_token_id
+ width, pad = max(map(len, sequences)), 0

score-read-at-the-first-token: encoders have a token for it in front; in a decoder the first token has seen nothing
- scores = model(input_ids=ids, attention_mask=mask).logits[:, 0]
+ scores = model(input_ids=ids[:, :1], attention_mask=mask[:, :1]).logits[:, 0]

mask-of-the-other-side: prompts are padded on the left, whole texts on the right
- [s + [pad] * (width - len(s)) for s in sequences]
+ [[pad] * (width - len(s)) + s for s in sequences]

schedule-off-by-one: steps count from 1 here and from 0 there; the last step then has a rate of 0
- done = max(0, step - 1 - args.warmup_steps)
+ done = max(0, step - args.warmup_steps)

warm-up-begins-at-zero: steps count from 1 here and from 0 there; the first step is then lost
- min(1.0, step / max(1, args.warmup_steps))
+ min(1.0, (step - 1) / max(1, args.warmup_steps))

no-bootstrap-at-truncation:offline: datasets have terminals, timeouts and ends of trajectories
(Farama-Foundation/D4RL#162: time-outs mislabelled)
- terminals > 0, np.roll(
+ ends, np.roll(

next-observation-of-the-reset:offline: the row after is the next observation but for the last row of a trajectory
-         data.next_obs[ends] = found["last_observations"].reshape(ends.sum(), obs.shape[1])

bounds-taken-as-symmetric: in MuJoCo most bounds are -1 and 1
- stretched = space.low + (actions.reshape(-1, *space.shape) + 1) / 2 * (space.high - space.low)
+ stretched = actions.reshape(-1, *space.shape) * space.high

rows-that-were-never-written: buffers are allocated whole
- held = min(self.total, self.capacity)
-         index
+ held = self.capacity
+         index

evaluation-with-training-noise: one sampler for both
- (1, 0.0),
+ (1, getattr(args, "temperature", 1.0)),

evaluation-moves-the-training-noise: one generator for everything: how often one evaluates changes what is learnt
- set_rng_state(before)
+ pass

evaluation-on-the-global-generator: a generator is an argument that may be left out
- random = stream(model.device, args.seed, *key, i)
+ random = None

biased-pass-at-k: the obvious formula is biased (arXiv 2107.03374, section 2.1)
- return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
+ return 1.0 - (1.0 - correct / n) ** k

engine-eos-dropped: the text has no EOS, and its tokens are taken to have none
- torch.tensor(one["token_ids"]) for one
+ torch.tensor(one["token_ids"][:-1]) for one

engine-temperature-left-out: the server's own default is taken
- n=num_samples, temperature=temperature, top_p=1.0,
+ n=num_samples, top_p=1.0,

engine-top-k-left-out: a model's generation settings fill it in (Qwen2.5: top_k 20)
- top_k=0, min_p=0.0,
+ min_p=0.0,

runs-of-any-script: their arguments often have the same names
- if by != algo:
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
- stream("cpu", args.seed, *key, i)
+ stream("cpu", args.seed, *key)

engine-order-of-arrival: completions of a prompt come as they end
- sorted(choices, key=lambda one: one["index"])
+ choices

engine-own-eos-ends: the server's EOS is not the run's where --eos-token says another
- ignore_eos=True, stop_token_ids=eos
+ ignore_eos=False, stop_token_ids=eos

engine-loaded-once: the weights of the start are sampled from for ever
- if now and getattr(model, "sent", None) == now:
+ if now and hasattr(model, "sent"):

dropout-in-the-ratio: model.train() is a habit; the policy that is updated then is not the one that sampled
-                 setattr(module, name, 0.0)
+                 pass

prompts-of-the-first-minibatch: the rows move on, the prompts do not
- prompts = rows // group
+ prompts = (rows - within[0].to(ids.device)) // group

unequal-groups-share-a-prompt: groups are cut where a micro-batch ends, and the prompts are dealt out evenly
- if not tokens and (size % group == 0 or group % size == 0):
+ if not tokens:

alarm-that-nan-passes: a comparison with NaN is false
- if gap is None or gap <= limit:
+ if gap is None or not gap > limit:

alarm-of-a-server-that-never-stops: the rows that are looked at are those since the last evaluation
- [-2:] == [True, True]:
+ [-2:] == [True, True, True]:

deviation-of-one-process: the mean is that of all, the squares are one's own
- (total((known - mean).square().sum())
+ ((known - mean).square().sum()

means-of-means: each micro-batch is averaged, and their means are
- (torch.ones_like(value) * mask).sum()])
+ mask.any().to(value.dtype)])

half-of-the-prompts: each process has what comes next in the list, of which the others have some too
- return items[rank() :: world()]
+ return items[rank() :]

shards-averaged-twice: replicas are summed by hand, and shards, which are summed already, too
- if dist.is_initialized() and not sharded(model):
+ if dist.is_initialized():

adapters-not-saved: the merged model holds them, but nobody can go on with them
-         model.save_pretrained(folder / "adapter", state_dict=state, save_embedding_layers=False)
+         pass

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
- * (deviation.square() + 1e-8).rsqrt()
+ / (deviation.square() + 1e-8).sqrt()

same:terms-of-dpo
- return -(1 - e) * logsigmoid(logits) - e * logsigmoid(-logits)
+ return -(e * logsigmoid(-logits) + (1 - e) * logsigmoid(logits))

same:factors-of-sft
- -(logps * mask).sum() / tokens
+ (-logps * mask).sum() / tokens

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
- raw.amin(1)
+ raw.min(1).values

same:sign-before-nan
- (first - second).nan_to_num(0.0).sign()
+ (first - second).sign().nan_to_num(0.0)
""")
