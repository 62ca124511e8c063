"""Data: Megatron token files, training samples and blends, batches, tokenizers, preparation.

Read first: indexed.py (files), then samples.py and loader.py.
"""

from megafsdp.data.blend import BlendedDataset, build_blending_indices, samples_per_dataset
from megafsdp.data.indexed import IndexedDataset
from megafsdp.data.indexed_writer import IndexedDatasetWriter, merge, token_dtype
from megafsdp.data.loader import PADDING_SAMPLE_ID, Batch, Loader
from megafsdp.data.prep import PrepOptions, PrepRecord, SplitRecord, prepare
from megafsdp.data.sample_index import split_ranges
from megafsdp.data.samples import DEFAULT_SEED, SampleDataset, SampleSource
from megafsdp.data.token_range import check_vocabulary, token_range
from megafsdp.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "DEFAULT_SEED",
    "PADDING_SAMPLE_ID",
    "Batch",
    "BlendedDataset",
    "ByteTokenizer",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "JsonTokenizer",
    "Loader",
    "PrepOptions",
    "PrepRecord",
    "SampleDataset",
    "SampleSource",
    "SplitRecord",
    "Tokenizer",
    "build_blending_indices",
    "check_vocabulary",
    "load_tokenizer",
    "merge",
    "prepare",
    "samples_per_dataset",
    "split_ranges",
    "token_dtype",
    "token_range",
]
