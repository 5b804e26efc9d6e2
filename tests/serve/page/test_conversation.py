"""The page's conversations with a scripted server: what is sent after requests that end in every way."""

import json

import pytest
from javascript import Scripts

# A server of lists of chunks: {"error": ..., "status": ...}, or {"chunks": [...]}; a chunk is a text of the
# answer, {"wait": true} (until it is aborted), {"break": true} (the connection), or an event as it is.
SERVER = """
class AbortController {
  constructor() { this.signal = { aborted: false, reject: () => {} }; }
  abort() {
    if (this.signal.aborted) return;
    this.signal.aborted = true;
    this.signal.reject(new Error("AbortError"));
  }
}
class TextDecoderStream {}

function textOf(chunk) {
  if (typeof chunk === "string") chunk = { choices: [{ delta: { content: chunk } }] };
  return typeof chunk.raw === "string" ? chunk.raw : `data: ${JSON.stringify(chunk)}\\n\\n`;
}

function reader(chunks, signal) {
  const left = [...chunks];
  return {
    async read() {
      if (signal.aborted) throw new Error("AbortError");
      const chunk = left.shift();
      if (chunk === undefined) return { done: true };
      if (chunk.wait) return new Promise((_, reject) => { signal.reject = reject; });
      if (chunk.break) throw new TypeError("network error");
      return { value: textOf(chunk), done: false };
    },
  };
}

function made(replies, mode = "chat", settings = {}) {
  const sent = [], failed = [];
  const send = async (path, body, signal) => {
    sent.push(body);
    const reply = replies.shift();
    if (reply.down) throw new TypeError("Failed to fetch");
    const json = async () => ({ error: { message: reply.error } });
    if (reply.error) return { ok: false, status: reply.status ?? 400, json };
    return { ok: true, body: { pipeThrough: () => ({ getReader: () => reader(reply.chunks, signal) }) } };
  };
  const conversation = new Conversation();
  let now = 0;
  const talk = new Talk({
    mode, conversation, send, settings: () => settings,
    changed: () => {}, failed: (error) => failed.push(error.message), clock: () => (now += 10),
  });
  return { talk, conversation, sent, failed };
}

async function turns() {
  for (let i = 0; i < 50; i++) await null;
}

// Steps: ["ask", text], ["retry"], ["edit", i, text], ["resume"], ["system", text]; ["during", step, [steps]]
// does steps while an answer waits; ["stop"], ["clear"], ["reload"].
async function play(replies, steps, mode, settings) {
  const it = made(replies, mode, settings);
  const back = [];
  const begin = ([kind, ...rest]) => it.talk.run(it.conversation[kind](...rest));
  for (const step of steps) {
    const [kind, first, second] = step;
    if (kind === "during") {
      const running = begin(first);
      await turns();
      for (const inner of second) {
        if (inner[0] === "stop") it.talk.stop();
        else if (inner[0] === "clear") it.talk.clear();
        else if (inner[0] === "system") it.conversation.system = inner[1];
        else if (inner[0] === "save") it.saved = JSON.parse(JSON.stringify(it.conversation.save()));
        else back.push(await begin(inner));
      }
      back.push(await running);
    } else if (kind === "system") it.conversation.system = first;
    else back.push(await begin(step));
  }
  const { exchanges } = it.conversation;
  const state = ({ question, answer }) => [question, answer.raw, answer.state, isPart({ answer })];
  return { sent: it.sent, failed: it.failed, back, states: exchanges.map(state), saved: it.saved, exchanges };
}

const restored = (saved) => {
  const { conversation, question } = Conversation.restored(saved);
  return { question, exchanges: conversation.exchanges, history: conversation.history() };
};
const events = (pieces) => {
  const reader = new EventReader();
  return pieces.flatMap((piece) => reader.feed(piece));
};
"""


@pytest.fixture(scope="module")
def scripts():
    return Scripts("conversation.js", "talk.js", more=SERVER)


@pytest.fixture
def play(scripts):
    return lambda *arguments: scripts.call("play", *arguments)


def end(reason="stop", **more):
    return {"choices": [{"delta": {}, "finish_reason": reason}], **more}


DONE = {"raw": "data: [DONE]\n\n"}


def answer(*chunks):
    return {"chunks": [*chunks, end(), DONE]}


def waiting(*chunks):
    """Return an answer that does not end."""
    return {"chunks": [*chunks, {"wait": True}]}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def messages(played, number=-1):
    return played["sent"][number]["messages"]


def test_a_conversation_is_sent_whole(play):
    played = play([answer("A", "1"), answer("A2")], [["system", "Be brief."], ["ask", "Q1"], ["ask", "Q2"]])
    system = {"role": "system", "content": "Be brief."}
    assert messages(played) == [system, user("Q1"), assistant("A1"), user("Q2")]
    assert played["back"] == [None, None] and not played["failed"]


# S38
@pytest.mark.parametrize("before", [waiting("partial ", "answer"), waiting()])
def test_clear_while_it_streams_leaves_nothing_behind(play, before):
    played = play([before, answer("A")], [["during", ["ask", "Q1"], [["clear"]]], ["ask", "Q2"]])
    assert messages(played) == [user("Q2")]
    assert [state[:3] for state in played["states"]] == [["Q2", "A", "done"]]
    assert played["back"] == [None, None], "a cleared question does not come back"


def test_clear_cuts_the_old_answer_off_from_a_new_question(play):
    played = play([waiting("old"), answer("new")], [["during", ["ask", "Q1"], [["clear"], ["ask", "Q2"]]]])
    assert messages(played) == [user("Q2")]
    assert [state[:3] for state in played["states"]] == [["Q2", "new", "done"]]


# S39
@pytest.mark.parametrize(
    "refusal, message",
    [
        ({"error": "prompt: too long"}, "prompt: too long"),
        ({"error": "wrong or missing API key", "status": 401}, "wrong or missing API key"),
        ({"error": "the queue is full", "status": 429}, "the queue is full"),
        ({"error": "loading", "status": 503}, "loading"),
        ({"down": True}, "Failed to fetch"),
        ({"chunks": [{"break": True}]}, "network error"),
        ({"chunks": [{"error": {"message": "the engine has stopped"}}, DONE]}, "the engine has stopped"),
        ({"chunks": []}, "the connection ended before the answer did"),
    ],
)
def test_a_refused_turn_is_taken_back(play, refusal, message):
    steps = [["ask", "Q1"], ["ask", "long"], ["ask", "short"]]
    played = play([answer("A1"), refusal, answer("A3")], steps)
    assert messages(played) == [user("Q1"), assistant("A1"), user("short")]
    assert [state[0] for state in played["states"]] == ["Q1", "short"]
    assert played["back"] == [None, "long", None], "its text returns to the field"
    assert played["failed"] == [message]


def test_a_question_asked_before_comes_back_too(play):
    played = play([answer("A"), {"error": "no"}], [["ask", "hi"], ["ask", "hi"]])
    assert played["back"] == [None, "hi"] and len(played["states"]) == 1


@pytest.mark.parametrize(
    "broken",
    [
        {"chunks": ["part", {"break": True}]},
        {"chunks": ["part", {"error": {"message": "gone"}}, DONE]},
        {"chunks": ["part"]},
    ],
)
def test_an_answer_that_breaks_off_is_shown_and_never_sent(play, broken):
    played = play([answer("A1"), broken, answer("A3")], [["ask", "Q1"], ["ask", "Q2"], ["ask", "Q3"]])
    assert messages(played) == [user("Q1"), assistant("A1"), user("Q3")]
    assert played["states"][1] == ["Q2", "part", "failed", False]
    assert played["exchanges"][1]["answer"]["error"] and not played["failed"], "said where it stands"


def test_what_the_user_stopped_stays_if_it_had_begun(play):
    stop = [["stop"]]
    played = play([waiting("half an"), answer("A")], [["during", ["ask", "Q1"], stop], ["ask", "Q2"]])
    assert messages(played) == [user("Q1"), assistant("half an"), user("Q2")]
    assert played["states"][0] == ["Q1", "half an", "stopped", True]
    played = play([waiting(), answer("A")], [["during", ["ask", "Q1"], stop], ["ask", "Q2"]])
    assert messages(played) == [user("Q2")] and played["back"] == ["Q1", None] and not played["failed"]


def test_one_answer_at_a_time(play):
    """Enter during an answer, a double click on Send, and Retry during an answer are ignored."""
    again = [["ask", "Q2"], ["retry"], ["edit", 0, "Q3"], ["resume"], ["stop"]]
    played = play([waiting("A")], [["during", ["ask", "Q1"], again]])
    assert len(played["sent"]) == 1 and [state[:2] for state in played["states"]] == [["Q1", "A"]]


def test_refused_retry_keeps_the_conversation(play):
    replies = [answer("A1"), answer("bad"), answer("good"), {"error": "full"}]
    played = play(replies, [["ask", "Q1"], ["ask", "Q2"], ["retry"], ["retry"]])
    assert messages(played, 2) == messages(played, 1) == messages(played, 3)
    assert [state[:2] for state in played["states"]] == [["Q1", "A1"], ["Q2", "good"]]
    assert played["back"] == [None] * 4 and played["failed"] == ["full"]


def test_edit_drops_what_came_after_unless_it_is_refused(play):
    replies = [answer("A1"), answer("A2"), {"error": "full"}, answer("A")]
    played = play(replies, [["ask", "Q1"], ["ask", "Q2"], ["edit", 0, "Q?"], ["edit", 0, "Q!"]])
    assert messages(played) == [user("Q!")] and played["back"][2] == "Q?"
    assert [state[:2] for state in played["states"]] == [["Q!", "A"]]
    assert len(play(replies[:3], [["ask", "Q1"], ["ask", "Q2"], ["edit", 0, "Q?"]])["states"]) == 2


def test_a_cut_answer_says_so_and_goes_on(play):
    cut = {"chunks": ["one two", end("length"), DONE]}
    played = play([cut, answer(" three")], [["ask", "Count"], ["resume"]])
    assert messages(played) == [user("Count"), assistant("one two")]
    assert played["sent"][1]["continue_final_message"] and not played["sent"][1]["add_generation_prompt"]
    assert played["states"] == [["Count", "one two three", "done", True]]
    refused = play([cut, {"error": "full"}], [["ask", "Count"], ["resume"]])
    assert refused["states"] == [["Count", "one two", "cut", True]]


def test_an_answer_without_text_is_shown_and_not_sent(play):
    """The model ends at once, or is cut while it thinks."""
    thought = {"chunks": ["<think>hm", end("length"), DONE]}
    played = play([answer(), thought, answer("A")], [["ask", "Q1"], ["ask", "Q2"], ["ask", "Q3"]])
    assert messages(played) == [user("Q3")]
    assert [state[2:] for state in played["states"]] == [["done", False], ["cut", False], ["done", True]]


def test_a_system_prompt_holds_from_the_next_request_on(play):
    during = ["during", ["ask", "Q1"], [["system", "new"], ["stop"]]]
    played = play([waiting("A1"), answer("A2")], [["system", "old"], during, ["ask", "Q2"]])
    assert [body["messages"][0]["content"] for body in played["sent"]] == ["old", "new"]
    assert len(messages(play([answer("A")], [["system", "  "], ["ask", "Q"]]))) == 1


def test_close_after_the_last_event_is_no_failure(play):
    assert play([{"chunks": ["A", end()]}], [["ask", "Q"]])["states"][0][2] == "done"


@pytest.mark.parametrize(
    "raw, thought, text",
    [
        ("<think>\na\n</think>\n\nb", "a", "b"),
        ("<think>\na", "a", ""),
        ("a\n</think>\n\nb", "a", "b"),  # the template opened the thought
        ("<think>\n\n</think>\n\nb", "", "b"),
        ("the tag `</think>` ends it", "", "the tag `</think>` ends it"),
        ("plain", "", "plain"),
    ],
)
def test_thoughts_are_told_apart_and_not_sent_back(play, scripts, raw, thought, text):
    parts = scripts.call("thoughtAndText", {"raw": raw, "reasoning": ""})
    assert (parts["thought"], parts["text"]) == (thought, text)
    played = play([answer(raw), answer("A")], [["ask", "Q1"], ["ask", "Q2"]])
    assert messages(played)[:-1] == ([user("Q1"), assistant(text)] if text else [])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_in_fields_of_their_own(play, name):
    chunks = [{"choices": [{"delta": {name: "hm"}}]}, "A"]
    played = play([answer(*chunks), answer("B")], [["ask", "Q1"], ["ask", "Q2"]])
    assert played["exchanges"][0]["answer"]["reasoning"] == "hm"
    assert messages(played) == [user("Q1"), assistant("A"), user("Q2")]


def test_figures_of_an_answer(play):
    """The scripted clock advances 10 ms per reading: at the request, the first piece and each usage."""
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    played = play([answer("a", {"choices": [], "usage": usage})], [["ask", "Q"]])
    assert played["exchanges"][0]["answer"]["figures"] == {
        "first_ms": 10, "prompt_tokens": 5, "cached_tokens": 4, "completion_tokens": 3,
        "tokens_per_second": 200,
    }  # fmt: skip


def test_settings_that_are_left_out_are_not_sent(play):
    body = play([answer("A")], [["ask", "Q"]], "chat", {"temperature": 0})["sent"][0]
    assert body.keys() == {"temperature", "stream", "stream_options", "messages"}


def test_completions(play):
    text = {"choices": [{"text": " b", "finish_reason": None}]}
    cut = {"chunks": [text, {"choices": [{"text": "", "finish_reason": "length"}]}, DONE]}
    played = play(
        [cut, {"chunks": [text, end(), DONE]}, answer()],
        [["ask", "a"], ["resume"], ["ask", "z"]],
        "completion",
    )
    assert [body["prompt"] for body in played["sent"]] == ["a", "a b", "z"], "each on its own"
    assert played["sent"][0]["max_tokens"] == 256 and played["states"][0][:2] == ["a", " b b"]


@pytest.mark.parametrize("chunks, question", [([], "Q2"), (["half"], None)])
def test_a_reload_in_the_middle_of_an_answer(play, scripts, chunks, question):
    during = ["during", ["ask", "Q2"], [["save"], ["stop"]]]
    saved = play([answer("A1"), waiting(*chunks)], [["ask", "Q1"], during])["saved"]
    found = scripts.call("restored", saved)
    past = [user("Q1"), assistant("A1")]
    assert found["question"] == question
    assert found["history"] == (past if question else [*past, user("Q2"), assistant("half")])
    assert all(each["answer"]["state"] != "running" for each in found["exchanges"])


@pytest.mark.parametrize(
    "saved", [None, {}, 3, {"system": 1, "exchanges": []}, {"system": "", "exchanges": [{}]}]
)
def test_foreign_saved_data_gives_an_empty_conversation(scripts, saved):
    assert scripts.call("restored", saved) == {"question": None, "exchanges": [], "history": []}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_in_pieces_of_any_size(scripts, size):
    wanted = [json.dumps({"text": text}) for text in ("a", "b\n\nc", "d\u2028e", "x" * 50)]
    text = "".join(f": ping\n\ndata: {data}\n\n" for data in wanted)
    for whole in (text, text.replace("\n", "\r\n").replace("data: ", "data:")):
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert scripts.call("events", pieces) == wanted
