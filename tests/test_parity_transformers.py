"""dt.py, dpt.py, sft.py and reward_model.py compute what models of transformers compute from the same weights and
batches.

dpt: GPT-2, as the authors' code builds and trains it (jon--lee/decision-pretrained-transformer, commit 15172df, net.py
and train.py), but for its activation and number of heads.
"""

import pytest  # noqa: I001
import torch
from control import close, float64
from test_exact_dpt import ARGS, bandits
from test_exact_dpt import A as ARMS
from test_exact_dpt import H as HORIZON
from test_exact_dt import LONGEST, A, D, K, W, gradients, make_model, make_windows
from test_sft import PAIRS, small_model
from test_sft import gradients as sft_gradients
from torch.nn import functional as F
from transformers import (
    DecisionTransformerConfig, DecisionTransformerModel, GPT2Config, GPT2Model, LlamaConfig,
    LlamaForSequenceClassification,
)  # fmt: skip

from algos import dpt, reward_model


def their_transformer(ours, num_heads: int) -> tuple[DecisionTransformerModel, list[tuple]]:
    """transformers' Decision Transformer with our weights, and which of its layers is which of ours."""
    config = DecisionTransformerConfig(
        state_dim=D, act_dim=A, hidden_size=W, max_ep_len=LONGEST, n_layer=len(ours.blocks), n_head=num_heads,
        activation_function="relu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    theirs = DecisionTransformerModel(config).to(torch.get_default_dtype()).train()
    theirs.encoder.wpe.weight.data.zero_()  # an embedding of position 0 for all tokens, which the paper lacks
    pairs = [(ours.embed_rtg, theirs.embed_return), (ours.embed_obs, theirs.embed_state),
             (ours.embed_action, theirs.embed_action), (ours.embed_timestep, theirs.embed_timestep),
             (ours.norm_in, theirs.embed_ln), (ours.norm_out, theirs.encoder.ln_f),
             (ours.predict_action, theirs.predict_action[0])]  # fmt: skip
    return theirs, with_blocks(pairs, ours, theirs.encoder)


def with_blocks(pairs: list[tuple], ours, theirs) -> list[tuple]:
    """Which layer is which, also of the blocks; theirs get our weights."""
    for own, block in zip(ours.blocks, theirs.h):
        pairs += [(own.norm1, block.ln_1), (own.norm2, block.ln_2), (own.qkv, block.attn.c_attn),
                  (own.out, block.attn.c_proj), (own.up, block.mlp.c_fc), (own.down, block.mlp.c_proj)]  # fmt: skip
    for own, other in pairs:
        other.load_state_dict({name: turned(other, x) for name, x in own.state_dict().items()})
    return pairs


def turned(layer, tensor: torch.Tensor) -> torch.Tensor:
    """GPT-2's linear layers have transposed weights."""
    return tensor.T if type(layer).__name__ == "Conv1D" and tensor.dim() == 2 else tensor


@float64()
@pytest.mark.parametrize("num_heads", [1, 2, 4])
@pytest.mark.parametrize("real", [(K,) * 6, (K, 1, 3, K, 2, 4)], ids=["whole", "padded"])
@pytest.mark.parametrize("script", ["dt"])
def test_decision_transformer(script, num_heads, real):
    """Predictions at real steps, and the gradient of the mean squared error over them."""
    model, batch = make_model(num_heads=num_heads), make_windows(1, real)
    theirs, pairs = their_transformer(model, num_heads)
    batch.timesteps[-1] += LONGEST - 2  # beyond the last embedding, which stands for all that follow
    predicted = theirs(states=batch.obs, actions=batch.actions, returns_to_go=batch.rtg,
                       timesteps=batch.timesteps.clamp(max=LONGEST - 1),
                       attention_mask=batch.mask.long()).action_preds  # fmt: skip
    close(model(batch)[batch.mask], predicted[batch.mask])
    (predicted - batch.actions)[batch.mask].square().mean().backward()
    _, slopes = gradients(model, batch)
    names = {module: name for name, module in model.named_modules()}
    for own, other in pairs:
        for name, parameter in other.named_parameters():
            slope = slopes[f"{names[own]}.{name}"]
            close(slope, turned(other, parameter.grad))
            assert slope.any()


@float64()
@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("script", ["dpt"])
def test_decision_pretrained_transformer(script, num_heads):
    """Of contexts shorter than the horizon. They train no output for the empty one, and their loss is a sum."""
    torch.manual_seed(0)
    args, steps = dpt.Args(**ARGS | dict(num_heads=num_heads)), HORIZON - 2
    ours, (means, context) = dpt.DecisionPretrainedTransformer(args), bandits(6, steps, args)
    theirs = GPT2Model(GPT2Config(n_positions=HORIZON, n_embd=8, n_layer=2, n_head=num_heads, resid_pdrop=0.0,
                                  activation_function="relu", embd_pdrop=0.0, attn_pdrop=0.0)).double()  # fmt: skip
    own = [ours.norm_out, ours.embed_timestep, *ours.blocks]
    for parameter in [parameter for part in own for parameter in part.parameters()]:
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    pairs = with_blocks([(ours.norm_out, theirs.ln_f), (ours.embed_timestep, theirs.wpe)], ours, theirs)
    pulls = torch.cat([F.one_hot(context.actions, ARMS), context.rewards[..., None]], 2)
    outputs = theirs(inputs_embeds=ours.embed_pull(torch.cat([torch.zeros(6, 1, ARMS + 1), pulls], 1)))
    logits, found, best = ours.predict_action(outputs.last_hidden_state), ours(context), means.argmax(1)
    close(found, logits)
    wanted = F.one_hot(best, ARMS).double().repeat_interleave(steps, 0)
    theirs_loss = F.cross_entropy(logits[:, 1:].reshape(-1, ARMS), wanted, reduction="sum") / (6 * steps)
    loss = dpt.dpt_loss(found[:, 1:], best)
    close(loss, theirs_loss)
    (loss - theirs_loss).backward()  # layers that both have cancel out
    assert max(ours.embed_pull.weight.grad.abs().max(), ours.predict_action.weight.grad.abs().max()) < 1e-12
    for own, other in pairs:
        for name, parameter in other.named_parameters():
            close(own.get_parameter(name).grad, -turned(other, parameter.grad))
            assert parameter.grad.any()


@pytest.mark.parametrize("script", ["sft"])
def test_sft_on_labels_of_completions(script):
    """One step in two micro-batches beside the model's own loss on all: right padding, labels -100 on prompts."""
    model = small_model()
    width = max(len(p) + len(c) for p, c in PAIRS)
    ids = torch.tensor([p + c + [0] * (width - len(p + c)) for p, c in PAIRS])
    labels = torch.tensor([[-100] * len(p) + c + [-100] * (width - len(p + c)) for p, c in PAIRS])
    lengths = torch.tensor([[len(p) + len(c)] for p, c in PAIRS])
    loss = model(input_ids=ids, attention_mask=(torch.arange(width) < lengths).long(), labels=labels).loss
    loss.backward()
    ours, metrics = sft_gradients(PAIRS, 2)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-6, atol=1e-7)


def classifier() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_labels=1,
                         num_attention_heads=2, pad_token_id=0)  # fmt: skip
    return LlamaForSequenceClassification(config).double()


@pytest.mark.parametrize("script", ["reward_model"])
def test_reward_model_on_single_sequences(script):
    """One step on pairs of several lengths in micro-batches, beside each sequence on its own, without padding."""
    pairs = [reward_model.Pair(p + c, PAIRS[i - 1][0] + PAIRS[i - 1][1], 0.3 * i) for i, (p, c) in enumerate(PAIRS)]
    model, theirs = classifier(), classifier()
    args = reward_model.Args(micro_batch_size=2, max_grad_norm=1e9, precision="float32", center_coef=0.05)
    reward_model.update(model, torch.optim.SGD(model.parameters(), 1.0), pairs, args)
    for pair in pairs:
        chosen, rejected = (theirs(input_ids=torch.tensor([ids])).logits[0, 0] for ids in pair[:2])
        loss = -F.logsigmoid(chosen - rejected - pair.margin) + 0.05 * (chosen + rejected) ** 2
        (loss / len(pairs)).backward()
    moved = dict(model.named_parameters())
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(p.detach() - moved[name].detach(), p.grad, rtol=1e-9, atol=1e-12)
