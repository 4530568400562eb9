"""Folders of Hugging Face's transformers: `config.json`, safetensors files, and tensors under the names there."""
