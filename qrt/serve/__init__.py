"""The server. LightLLM's roles by module, and the way of a request through them:

    httpserver       the API process: openai or lightllm (JSON to SamplingParams), tokenizer, chat_template
    engine_client    -> sockets -> router, by messages
    router           the engine process: requests of all clients into one engine, step by step
    (model backend)  qrt.engine.runner
    detokenizer      back in the API process: qrt.text.collector, replies, answer

`supervisor` starts and watches the processes, `app` puts the routes together.
"""
