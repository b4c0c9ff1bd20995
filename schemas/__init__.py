"""The contract between the services: what is written to the log, in which shape, and what is legal.

Imports nothing of this project and none of torch, vllm, mlflow, kafka.
"""
