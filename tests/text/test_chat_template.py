"""Chat templates: those of transformers render alike; hostile ones are refused and leave nothing running."""

import threading

import pytest

import qrt.text.chat_template as chat_template
from qrt.errors import ConfigError, UnsupportedError
from qrt.text.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Größe?  <b>&amp;</b>"},
    {"role": "assistant", "content": "Two  metres "},
]
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {%- if loop.first and message['role'] == 'system' %}
        {%- set system = message.content %}{%- continue %}
    {%- endif %}
    {%- generation %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + '</s>' }}
    {%- endgeneration %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}"""


@pytest.mark.parametrize("generation", [True, False])
def test_renders_as_transformers(generation):
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = [{"type": "function", "function": {"name": "f", "description": "ä", "parameters": {}}}]
    rendered, _ = render_jinja_template(
        [MESSAGES], tools=tools, chat_template=LLAMA, add_generation_prompt=generation, bos_token="<s>"
    )
    template = ChatTemplate(LLAMA, {"bos_token": "<s>"})
    assert template.render(MESSAGES, tools=tools, add_generation_prompt=generation) == rendered[0]


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_tools_that_the_template_ignores_are_refused(name):
    """The model would answer as if it had never been given."""
    items = [{"type": "function", "function": {"name": "f"}}]
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(UnsupportedError, match=f"{name}: expected none, .*, got 1; leave them out"):
        ChatTemplate(plain, {}).render(MESSAGES, **{name: items})
    assert ChatTemplate(plain, {}).render(MESSAGES, **{name: []})
    assert "function" in ChatTemplate(plain + "{{ " + name + " }}", {}).render(MESSAGES, **{name: items})


def test_developer_becomes_system_if_the_template_lacks_it():
    """Qwen 2.5's template shows the roles it knows, and none of the rest."""
    messages = [{"role": "developer", "content": "In French."}, {"role": "user", "content": "Hi"}]
    known = "{% for m in messages %}{% if m.role in ('system', 'user') %}<{{ m.role }}>{{ m.content }}"
    shown = ChatTemplate(known + "{% endif %}{% endfor %}", {}).render(messages)
    assert shown == "<system>In French.<user>Hi"
    own = "{% for m in messages %}{% if m.role == 'developer' %}{{ m.content }}{% endif %}{% endfor %}"
    assert ChatTemplate(own, {}).render(messages) == "In French."
    prose = "You help developers." + known + "{% endif %}{% endfor %}"
    assert ChatTemplate(prose, {}).render(messages) == "You help developers." + shown


def test_the_final_message_goes_on():
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}", {})
    text = template.render(MESSAGES, continue_final_message=True)
    assert text.endswith("<assistant>Two  metres ") and text.count("</s>") == 2
    with pytest.raises(ConfigError, match="without add_generation_prompt"):
        template.render(MESSAGES, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(ConfigError, match="no text to continue"):
        template.render([{"role": "user", "content": ""}], continue_final_message=True)
    hiding = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(ConfigError, match="does not show the final message"):
        hiding.render(MESSAGES, continue_final_message=True)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ 'x' | center(999999999) }}",
        "{{ lipsum(n=9999) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'x' %}",
        "{{ raise_exception('no') }}",
        "{{ undefined.attribute }}",
        "{{ messages[0].content.encode('idna').decode('unknown') }}",
    ],
)
def test_hostile_templates_are_refused_by_rule(text, monkeypatch):
    """Each ends by what it asks for, none by the clock."""
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 60.0)
    with pytest.raises(ConfigError, match="chat") as refused:
        ChatTemplate(text, {}).render(MESSAGES)
    assert "did not end" not in str(refused.value)


def test_a_template_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.3)
    loops = "{% set a = [0] * 900 %}" + "{% for i in a %}" * 4 + "{% endfor %}" * 4
    before = threading.active_count()
    with pytest.raises(ConfigError, match="did not end within 0.3 s"):
        ChatTemplate(loops, {}).render(MESSAGES)
    assert threading.active_count() == before, "the thread still runs"


def test_size_and_syntax():
    with pytest.raises(ConfigError, match="expected at most 65536"):
        ChatTemplate("x" * 70_000, {})
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("{% if %}", {})
