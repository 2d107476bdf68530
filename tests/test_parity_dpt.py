"""dpt.py against transformers' GPT-2, as the authors' code builds and trains it (jon--lee/decision-pretrained-
transformer at commit 15172df, net.py and train.py), but for its activation and number of heads."""

import pytest
import torch
from control import close, float64
from test_exact_dpt import ARGS, A, H, bandits
from test_parity_transformers import turned
from torch.nn import functional as F
from transformers import GPT2Config, GPT2Model

from algos import dpt


@float64()
@pytest.mark.parametrize("num_heads", [1, 4])
def test_logits_loss_and_gradients(num_heads):
    """Of contexts shorter than the horizon. They train no output for the empty one, and their loss is a sum."""
    torch.manual_seed(0)
    args = dpt.Args(**ARGS | dict(num_heads=num_heads))
    ours, (means, context) = dpt.DecisionPretrainedTransformer(args), bandits(6, H - 2, args)
    theirs = GPT2Model(GPT2Config(n_positions=H, n_embd=8, n_layer=2, n_head=num_heads, activation_function="relu",
                                  resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()  # fmt: skip
    pairs = [(ours.norm_out, theirs.ln_f), (ours.embed_timestep, theirs.wpe)]
    for own, block in zip(ours.blocks, theirs.h):
        pairs += [(own.norm1, block.ln_1), (own.norm2, block.ln_2), (own.qkv, block.attn.c_attn),
                  (own.out, block.attn.c_proj), (own.up, block.mlp.c_fc), (own.down, block.mlp.c_proj)]  # fmt: skip
    for own, other in pairs:
        for parameter in own.parameters():
            torch.nn.init.normal_(parameter, 0.1, 0.3)
        other.load_state_dict({name: turned(other, x) for name, x in own.state_dict().items()})
    pulls = torch.cat([F.one_hot(context.actions, A), context.rewards[..., None]], 2)
    outputs = theirs(inputs_embeds=ours.embed_pull(torch.cat([torch.zeros(6, 1, A + 1), pulls], 1)))
    logits, found, best = ours.predict_action(outputs.last_hidden_state), ours(context), means.argmax(1)
    close(found, logits)
    wanted = F.one_hot(best, A).double().repeat_interleave(H - 2, 0)
    theirs_loss = F.cross_entropy(logits[:, 1:].reshape(-1, A), wanted, reduction="sum") / (6 * (H - 2))
    loss = dpt.dpt_loss(found[:, 1:], best)
    close(loss, theirs_loss)
    (loss - theirs_loss).backward()  # layers that both have cancel out
    assert max(ours.embed_pull.weight.grad.abs().max(), ours.predict_action.weight.grad.abs().max()) < 1e-12
    for own, other in pairs:
        for name, parameter in other.named_parameters():
            close(own.get_parameter(name).grad, -turned(other, parameter.grad))
            assert parameter.grad.any()
