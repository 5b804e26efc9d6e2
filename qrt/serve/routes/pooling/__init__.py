"""Routes of models that pool: embeddings, labels and scores, by OpenAI's, vLLM's and Cohere's shapes."""
