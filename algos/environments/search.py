"""python algos/grpo_multiturn.py --environment search:CORPUS.jsonl --task questions.jsonl --model ORG/NAME

A search engine (Search-R1, arXiv 2503.09516): the best passages of a corpus, ranked by BM25 (pip install bm25s).
"""

import json
from functools import lru_cache
from typing import Any

from algos.environments.tool import Tool
from utils.core import UserError


def load(corpus: str) -> type:
    """The environment of one corpus."""
    corpus_index(corpus)  # complains, if at all
    return type("Search", (Search,), {"corpus": corpus})


class Search(Tool):
    tag, shown, stop = "search", "information", ("</search>", "</answer>")
    corpus: str  # a line for each passage: {"text": ...}
    top = 3  # passages in an answer

    def use(self, call: str) -> str:
        """Up to `top` passages that share a word with the query, best first."""
        import bm25s

        retriever, passages = corpus_index(self.corpus)
        words = bm25s.tokenize(call, return_ids=False, show_progress=False)
        numbers, scores = retriever.retrieve(words, k=min(self.top, len(passages)), show_progress=False)
        return "\n".join(passages[i] for i, score in zip(numbers[0], scores[0]) if score > 0)


@lru_cache
def corpus_index(corpus: str) -> tuple[Any, list[str]]:
    """BM25's index of the passages of a file, and these."""
    try:
        import bm25s
    except ImportError as error:
        raise UserError("searching needs bm25s: pip install bm25s") from error
    try:
        with open(corpus) as file:
            passages = [json.loads(line)["text"] for line in file if line.strip()]
        retriever = bm25s.BM25()
        retriever.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = f'--environment search:{corpus} must name a file with lines {{"text": ...}}'
        raise UserError(f"{wrong} ({error!r})") from error
    return retriever, passages
