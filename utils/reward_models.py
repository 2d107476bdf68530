"""Reward models: a number for a prompt and an answer to it, from any AutoModelForSequenceClassification with one label.

An ensemble is a folder with one such model in each of member-1, member-2, ... All members score and are combined.
"""

import math
import re
from pathlib import Path

import torch
from torch import Tensor

from utils.errors import UserError
from utils.models import loaded
from utils.text import encode_prompt, encode_whole, present, shared, until_eos

SCORED_AT_ONCE = 64  # sequences in one forward pass of a model that is a reward


def load_reward_model(path: str, device: torch.device | str = "cpu", flag: str = "--reward", dtype="auto",
                      new_head: bool = False, trust_remote_code: bool = False,
                      attn_implementation: str | None = None, **shards):  # fmt: skip
    """A sequence classifier with one label and its tokenizer, from a folder or the hub, with the weights as saved
    ("auto") or of `dtype`, and whether its head is new. `new_head` also admits a causal language model. shards: as
    `shard_settings` returns them.

    Raises UserError, which names `flag`, for what cannot be loaded and, without `new_head`, for a model whose head has
    no saved weights: transformers would score with random ones.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    wanted = "a reward model, which algos/reward_model.py trains, is a sequence classifier with one label"
    config = loaded(AutoConfig, path, flag, trust_remote_code=trust_remote_code)
    kind = (config.architectures or [type(config).__name__])[0]
    classifies = "ForSequenceClassification" in kind
    if not classifies and not new_head:
        raise UserError(f"{flag} {path} is a {kind}: {wanted}")
    if classifies and config.num_labels != 1:
        raise UserError(f"{flag} {path} has {config.num_labels} labels: {wanted}")
    tokenizer = loaded(AutoTokenizer, path, flag, trust_remote_code=trust_remote_code)
    model, report = loaded(AutoModelForSequenceClassification, path, flag, num_labels=1, dtype=dtype,
                           trust_remote_code=trust_remote_code, attn_implementation=attn_implementation,
                           output_loading_info=True, **shards)  # fmt: skip
    if report["missing_keys"] and classifies:
        raise UserError(f"{flag} {path} has no weights for {', '.join(sorted(report['missing_keys']))}: {wanted}")
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.sep_token  # BERT's
    if tokenizer.eos_token is None:
        raise UserError(f"the tokenizer of {flag} {path} has no EOS token: scores are read where an answer ends")
    set_padding(model, tokenizer, keep=classifies)
    pairs = "token_type_ids" in tokenizer.model_input_names and getattr(config, "type_vocab_size", 0) > 1
    model.separator = tokenizer.sep_token_id if pairs else None
    return model.to(device), tokenizer, not classifies  # in evaluation mode


def set_padding(model, tokenizer, keep: bool) -> None:
    """Pads on the right with a token that the tokenizer and the saved configuration agree on.

    Decoders are pooled at the last token that is not padding, by id: the padding token must not be EOS, or the score is
    read one token earlier. It need not be unused. `keep`: a trained model's own stays, if it has
    one. A tokenizer with no special token but EOS (GPT-2's) pads with it.
    """
    config = model.config.get_text_config()
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id, *sorted(special, reverse=True)]
    free = [i for i in candidates if i is not None and i != tokenizer.eos_token_id]
    if not keep or config.pad_token_id is None:
        config.pad_token_id = (free or [tokenizer.eos_token_id])[0]
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.padding_side = "right"


def encode_answer(row: dict, answer: str | list[dict], tokenizer) -> list[int]:
    """Token ids of the row's prompt and an answer to it. Chat messages: all that the template makes of them. Text: the
    prompt, the answer up to its first EOS, and EOS; an encoder's tokenizer joins the two itself. An answer that a
    length limit cut off is one that ends there."""
    prompt = present(row, tokenizer)
    if not isinstance(prompt, str):
        return encode_whole(row, answer, tokenizer)
    alone = encode_prompt(row, tokenizer)
    if alone[-1] == tokenizer.sep_token_id:  # BERT
        return tokenizer(prompt, answer)["input_ids"]
    tokens = encode_whole(row, answer, tokenizer)
    start = shared(alone, tokens)
    return tokens[:start] + until_eos(tokens, start, tokenizer, [tokenizer.eos_token_id])


def sequence_scores(model, sequences: list[list[int]]) -> Tensor:
    """Scores (B,) of B token lists, padded on the right: the model's own forward pass, so its own pooling. What stands
    behind the first separator is the second segment, where the model has segments."""
    width, pad = max(map(len, sequences)), model.config.get_text_config().pad_token_id
    ids = torch.tensor([s + [pad] * (width - len(s)) for s in sequences], device=model.device)
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences], device=model.device)
    more = {}
    if getattr(model, "separator", None) is not None:  # BERT tells prompt and answer apart
        ends = (ids == model.separator).long()
        more["token_type_ids"] = ((ends.cumsum(1) - ends).clamp(max=1) * mask).long()
    scores = model(input_ids=ids, attention_mask=mask, **more).logits[:, 0]
    return scores if scores.dtype == torch.float64 else scores.float()


def aggregate(scores: Tensor, how: str) -> Tensor:
    """Scores (K, B) of K members -> (B,): `mean`, `worst-case` (the smallest) or `uncertainty=L` (the mean minus L
    times the population variance over members). Coste et al. 2023 (arXiv 2310.02743): mean, WCO and UWO."""
    if how == "worst-case":
        return scores.amin(0)
    weight = float(how.partition("=")[2] or 0)
    return scores.mean(0) - weight * scores.var(0, correction=0)


def model_and_aggregation(spec: str) -> tuple[str, str] | None:
    """The folder or hub name and what follows its colon; None where `spec` names a function, FILE.py:NAME or
    PACKAGE.MODULE:NAME (also of a package that lies in a folder of that name)."""
    source, _, how = spec.rpartition(":")
    if not source or Path(spec).expanduser().is_dir():
        return (spec, "") if "/" in spec or Path(spec).is_dir() else None
    folder = Path(source).expanduser()
    is_model = "/" in source or (folder / "config.json").is_file() or (folder / "member-1").is_dir()
    return (source, how) if is_model and not source.endswith(".py") else None


class RewardModel:
    """What --reward has for a model or an ensemble: called with B rows and the texts of B answers, returns B scores."""

    def __init__(self, path: str, how: str, spec: str, device: torch.device | str, trust_remote_code: bool = False):
        folder = Path(path).expanduser()
        self.__name__ = folder.name  # of its column
        members = sorted(map(str, folder.glob("member-*")))
        if how and not members:
            raise UserError(f"--reward {spec} ends in :{how} but {path} is one model, no ensemble: leave :{how} away")
        self.how, kinds = how or "mean", "mean, worst-case, or uncertainty=NUMBER, at least 0"
        if not re.fullmatch(r"mean|worst-case|uncertainty=\d*\.?\d+(e-?\d+)?", self.how):
            raise UserError(f"--reward {spec} ends in :{how}: an ensemble takes {kinds}")
        parts = [load_reward_model(m, device, trust_remote_code=trust_remote_code) for m in members or [path]]
        self.members, self.tokenizer = [model for model, _, _ in parts], parts[0][1]
        for member in self.members:
            member.config.get_text_config().use_cache = False  # keys and values would outweigh the model

    @torch.no_grad()
    def __call__(self, rows: list[dict], texts: list[str]) -> list[float]:
        sequences = [encode_answer(row, text, self.tokenizer) for row, text in zip(rows, texts)]
        config, longest = self.members[0].config.get_text_config(), max(map(len, sequences))
        limit = getattr(config, "max_position_embeddings", None) or math.inf
        for name, module in self.members[0].named_modules():
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
                limit -= module.padding_idx + 1  # RoBERTa counts positions from behind that of padding
        if longest > limit:
            wrong = f"a prompt with its answer has {longest} tokens and the reward model {self.__name__} takes {limit}"
            raise UserError(f"{wrong}: lower --max-completion-length, or drop long prompts")
        batches = [sequences[i : i + SCORED_AT_ONCE] for i in range(0, len(sequences), SCORED_AT_ONCE)]
        scores = [torch.cat([sequence_scores(member, batch) for batch in batches]) for member in self.members]
        return aggregate(torch.stack(scores), self.how).tolist()
