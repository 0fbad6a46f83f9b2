"""Prompts: arithmetic set, tokenizer and chat template, loader by update number, packing into rows."""
