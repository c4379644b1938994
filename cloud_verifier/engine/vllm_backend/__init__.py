"""Run a target by vLLM: its model, kernels and KV cache under our sessions, scheduling and coupled sampling."""

SUPPORTED = "0.32"
"""The minor version of vLLM whose private interfaces these modules use."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core runs in the engine's own process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `worker` replaces a method of the first one
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the operator's taskset decides
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Variables that must be set before vLLM is imported, unless the operator has set others."""
