"""Chat templates in the shapes of well-known models, written for these tests.

Each reads messages as its model does: what it joins, trims, iterates over, refuses and asks of ids.
"""

QWEN25 = """{%- if tools %}<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}Be helpful.{% endif %}

<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}

</tools> Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% elif messages[0]['role'] == 'system' %}<|im_start|>system
{{ messages[0]['content'] }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
   or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}{% if message.content %}{{ '\n' + message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
{{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' + tool_call.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

QWEN3 = """{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
{{- '<tools>' }}{% for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}
{{- '\n</tools><tool_call></tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=messages|length - 1, looking=true) %}
{%- for message in messages[::-1] %}{% set index = (messages|length - 1) - loop.index0 %}
{%- if ns.looking and message.role == 'user' and message.content is string %}
{%- set ns.looking = false %}{% set ns.last = index %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = '' %}{% if message.content is string %}{% set content = message.content %}{% endif %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set thought = '' %}
{%- if message.reasoning_content is string %}{% set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and thought %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- content }}
{%- for tool_call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\n' }}{% endif %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
{{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{- tool_call.arguments }}
{%- else %}{{- tool_call.arguments | tojson }}{% endif %}{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

LLAMA31 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{% endfor %}{% endif %}
{{- system }}{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}
{{- '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- '}' }}
{{- '<|eot_id|>' }}
{%- elif message.role == 'tool' or message.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{% endif %}{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

MISTRAL = """{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
{%- if not (message.role == 'tool' or (message.tool_calls is defined and message.tool_calls is not none)) %}
{%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('After the optional system message, roles must alternate user/assistant') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for message in rest %}
{%- if message['role'] == 'user' %}
{%- if tools is not none and message == users[-1] %}
{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- if loop.last and system is defined %}{{- '[INST]' + system + '\n\n' + message['content'] + '[/INST]' }}
{%- else %}{{- '[INST]' + message['content'] + '[/INST]' }}{% endif %}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS][' }}
{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function | tojson %}{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{% if not loop.last %}{{- ', ' }}{% endif %}
{%- endfor %}{{- ']' + eos_token }}
{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}
{%- elif message['role'] == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + message.content | string + ', ' }}
{%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- if messages[0]['content'] is string %}{% set first = messages[0]['content'] + '\n\n' %}
{%- else %}{% set first = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}
{%- set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
{%- if message['content'] is string %}{{ message['content'] | trim }}
{%- elif message['content'] is iterable %}
{%- for item in message['content'] %}
{%- if item['type'] == 'image' %}{{ '<start_of_image>' }}
{%- elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}
{%- else %}{{ raise_exception('Invalid content type') }}{% endif %}{{ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

DEEPSEEK = """{%- set ns = namespace(system='', results=false) %}
{%- for message in messages %}{% if message['role'] == 'system' %}
{%- set ns.system = ns.system + message['content'] %}{% endif %}{% endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{% set ns.results = false %}{{- '<｜User｜>' + message['content'] }}
{%- elif message['role'] == 'assistant' and message['tool_calls'] %}
{{- '<｜Assistant｜>' }}{% if message['content'] is not none %}{{- message['content'] }}{% endif %}
{%- for tool in message['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n```json\n' }}
{{- tool['function']['arguments'] | tojson + '\n```<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'assistant' and message['content'] is not none %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{% endif %}"""

# Reads parts and nothing else, as templates of models that see images do; text is shown as no part of it.
PARTS = """{{ bos_token }}{% for message in messages %}{{ message['role'] | capitalize }}:
{%- for line in message['content'] %}
{%- if line['type'] == 'text' %}{{ ' ' + line['text'] }}{% elif line['type'] == 'image' %}<image>{% endif %}
{%- endfor %}<end>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""

# Writes arguments one by one, and so refuses what is no mapping.
ITEMS = """{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<function={{ c.function.name }}>{% for name, value in c.function.arguments.items() %}
<{{ name }}>{{ value }}</{{ name }}>{% endfor %}
</function>{% endfor %}{% endfor %}{{ tools | tojson if tools else '' }}"""

TEMPLATES = {
    "qwen2.5": QWEN25, "qwen3": QWEN3, "llama3.1": LLAMA31, "mistral": MISTRAL, "gemma": GEMMA,
    "deepseek": DEEPSEEK, "parts": PARTS, "items": ITEMS,
}  # fmt: skip
