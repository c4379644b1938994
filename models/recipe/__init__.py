"""The recipe of draft and heads for SmolLM2: let the target write, cut it down, and train by `outrider-distill`.

    outrider up --model "$(outrider models fetch smollm2)" --config models/recipe/recording.toml
    python -m models.recipe.ask --target DIR --gsm8k gsm8k_train.jsonl --minutes 60
    python -m models.recipe.start --target DIR --run RUN --traffic .outrider/traffic
    outrider-distill train RUN
    outrider-distill export --model RUN/model --tokenizer DIR --out first.gguf --quantization Q4_0 --embeddings Q4_0
    python -m models.recipe.start --target DIR --run RUN --quantized first.gguf --minutes 9
    outrider-distill train RUN/finetuned
    outrider-distill export --model RUN/finetuned/model --tokenizer DIR --out models/smollm2-draft.gguf \
        --quantization Q4_K_M --embeddings Q4_0
    outrider-distill train RUN/heads && cp RUN/heads/model/heads.safetensors models/smollm2-heads.safetensors

Most rows do not fit the blocks of Q4_K, so that llama.cpp stores them as Q5_0, which loses nearly nothing.

Every step can be stopped and repeated: questions add to the traffic, and a training goes on from its checkpoint.
"""
