"""The paper's anneal mix: every row of its Table 13, in per cent of text bytes, as public datasets.

    hf auth login                                   # once, after accepting the terms of the gated sets
    python prepare_data.py config/data_anneal.py    # data/anneal: 12 GB of text, 3 billion tokens

That is enough for 20k steps at any scale. Where this is not the paper's data:
- finepdfs-edu stands in for finepdfs cut down to its top three of twenty quality bins;
- rows that the table gives as "<0.1" are set to 0.05; its rounded rows sum to 100.2, and are scaled to 100;
- the paper's corpus was deduplicated across sources, and shuffled as a whole before any of it was drawn.
Nemotron-CC-v2, -v2.1, -CC-Math-v1, -CC-Code-v1 and -Pretraining-SFT-v1 are gated; the others are open.
"""

out_dir = "data/anneal"
tokenizer = "qwen3"
share_of = "bytes"
size = 12e9
val_fraction = 0.0005
shares = {
    # synthetic web rephrasings, 24.3
    "hub:nvidia/Nemotron-CC-v2:High-Quality-Synthetic": 14.9,
    "hub:nvidia/Nemotron-CC-v2.1:High-Quality-Synthetic": 6.0,
    "hub:nvidia/Nemotron-CC-v2.1:High-Quality-Translated-To-English-Synthetic": 3.5,
    # raw high-quality web, 16.6
    "hub:nvidia/Nemotron-CC-v2:High-Quality": 12.5,
    "hub:nvidia/Nemotron-CC-v2.1:High-Quality-Translated-To-English": 2.4,
    "hub:nvidia/Nemotron-CC-v2.1:High-Quality": 1.6,
    # web PDFs
    "hub:HuggingFaceFW/finepdfs-edu:eng_Latn": 15.9,  # a stand-in
    # synthetic diverse QA, 14.1
    "hub:nvidia/Nemotron-CC-v2:Diverse-QA": 8.3,
    "hub:nvidia/Nemotron-CC-v2:Translated-Diverse-QA": 5.3,
    "hub:nvidia/Nemotron-CC-v2.1:High-Quality-DQA": 0.4,
    # code, 11.9
    "hub:allenai/dolma3_mix-6T:data/stack_edu-*/*.jsonl.zst": 6.7,  # HuggingFaceTB/stack-edu holds no text
    "hub:nvidia/Nemotron-Pretraining-SFT-v1:Nemotron-SFT-Code": 2.8,
    "hub:nvidia/Nemotron-CC-Code-v1": 2.0,
    "hub:nvidia/Nemotron-Pretraining-Specialized-v1.1:Nemotron-Pretraining-Code-Concepts": 0.4,
    "hub:nvidia/Nemotron-Pretraining-Specialized-v1:Nemotron-Pretraining-Scientific-Coding": 0.1,
    # SFT, STEM, reasoning, 9.7
    "hub:nvidia/Nemotron-Pretraining-SFT-v1:Nemotron-SFT-General": 4.6,
    "hub:nvidia/Nemotron-Pretraining-Specialized-v1:Nemotron-Pretraining-STEM-SFT": 4.1,
    "hub:nvidia/Nemotron-Pretraining-Specialized-v1:Nemotron-Pretraining-RQA": 0.7,
    "hub:nvidia/Nemotron-Pretraining-Specialized-v1:Nemotron-Pretraining-InfiniByte-Reasoning": 0.2,
    "hub:nvidia/Nemotron-Pretraining-Specialized-v1.1:Nemotron-Pretraining-Multiple-Choice": 0.1,
    "hub:nvidia/Nemotron-Pretraining-Specialized-v1.1:Nemotron-Pretraining-Formal-Logic": 0.05,
    "hub:nvidia/Nemotron-Pretraining-Specialized-v1.1:Nemotron-Pretraining-Unconditional-Algorithmic": 0.05,
    # mathematics, arXiv, 6.9
    "hub:nvidia/Nemotron-CC-Math-v1:3": 2.5,
    "hub:nvidia/Nemotron-CC-Math-v1:4plus": 1.6,
    "hub:nvidia/Nemotron-CC-Math-v1:4plus_MIND": 1.1,
    "hub:allenai/dolma3_mix-6T:data/rpj-proofpile-arxiv/*.jsonl.zst": 0.9,
    "hub:nvidia/Nemotron-Pretraining-Specialized-v1:Nemotron-Pretraining-Math-Textbooks": 0.8,
    "hub:nvidia/Nemotron-Pretraining-SFT-v1:Nemotron-SFT-MATH": 0.1,
    # Wikipedia, 0.6
    "hub:nvidia/Nemotron-Pretraining-Specialized-v1:Nemotron-Pretraining-Wiki-Rewrite": 0.3,
    "hub:HuggingFaceFW/finewiki:en": 0.3,
}
