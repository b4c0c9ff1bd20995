"""Generation engines behind one port: hf (transformers, anywhere) and vllm."""
