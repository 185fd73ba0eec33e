// The page asks GET /requests once a second and draws what it says; the chat box is a client like any other.
"use strict";

const EVERY = 1000; // milliseconds between two looks
const MAX_CELLS = 960; // of the picture of blocks; beyond, a cell stands for several
const MAX_POINTS = 120; // of the curve of tokens a second

const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const points = [];
let key = sessionStorage.getItem("octavo.key") || "";
let messages = [];
let talking = null;
let isRefused = false; // by whoever closed the question for a key: it is not asked again and again
let opened = null; // the request whose timeline is shown, while it goes on

// Talking to the server

async function call(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.authorization = "Bearer " + key;
  const answer = await fetch(path, { ...options, headers });
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    const message = (body.error && body.error.message) || "the server answered " + answer.status;
    if (answer.status === 401) wantKey(key ? message : "");
    throw new Error(message);
  }
  return answer;
}

function wantKey(message) {
  $("key").hidden = false;
  show("ask-error", message);
  if (!isRefused) askForKey();
}

function askForKey() {
  if (!$("ask").open) $("ask").showModal();
}

$("key").onclick = askForKey;
$("key").hidden = !key;
$("ask").oncancel = () => (isRefused = true);
$("ask-form").onsubmit = (event) => {
  event.preventDefault();
  key = $("ask-key").value.trim();
  sessionStorage.setItem("octavo.key", key);
  isRefused = false;
  $("ask").close();
  look();
};

// Figures

const number = (value) => (value >= 10000 ? (value / 1000).toFixed(value >= 100000 ? 0 : 1) + "k" : String(Math.round(value)));

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return (value * 1000).toFixed(value < 0.00995 ? 1 : 0) + " ms";
  return value < 9.95 ? value.toFixed(2) + " s" : value < 120 ? value.toFixed(1) + " s" : (value / 60).toFixed(1) + " min";
}

function show(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function showState(state, label) {
  $("state").className = "state " + state;
  show("state", label || state);
}

function showEngine(engine) {
  show("model", engine.model);
  const again = engine.num_restarts ? `, restarted ${engine.num_restarts}×` : "";
  showState(engine.state, engine.state + again);
  show("running", String(engine.num_running));
  show("waiting", String(engine.num_waiting));
  show("swapped", String(engine.num_swapped));
  document.title = (engine.num_running ? engine.num_running + " running · " : "") + "Octavo";
  show("generated", number(engine.rates.generated));
  show("computed", number(engine.rates.computed));
  show("first50", seconds(engine.latencies.first_token.p50));
  show("first95", seconds(engine.latencies.first_token.p95));
  show("gap50", seconds(engine.latencies.between_tokens.p50));
  show("gap95", seconds(engine.latencies.between_tokens.p95));
  show("queue50", seconds(engine.latencies.in_queue.p50));
  const gap = engine.latencies.between_tokens.p50;
  show("each", gap ? number(1 / gap) : "–");
  const cached = engine.totals.num_cached_prompt_tokens || 0;
  const done = cached + (engine.totals.num_computed_prompt_tokens || 0);
  show("hits", done ? Math.round((100 * cached) / done) + "%" : "–");
  show("saved", number(cached));
  show("preempted", number(engine.totals.num_preemptions || 0));
  points.push(engine.rates.generated);
  if (points.length > MAX_POINTS) points.shift();
  drawSpark();
  showBlocks(engine.blocks);
}

// Pictures

function canvasOf(id, height) {
  const canvas = $(id);
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (height) canvas.style.height = height + "px";
  const tall = height || canvas.clientHeight;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(tall * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return [pen, width, tall];
}

function drawSpark() {
  const [pen, width, height] = canvasOf("spark");
  const most = Math.max(...points, 1);
  const x = (i) => width - (points.length - 1 - i) * (width / (MAX_POINTS - 1));
  const y = (value) => height - 2 - (value / most) * (height - 8);
  pen.strokeStyle = color("line");
  pen.lineWidth = 1;
  pen.strokeRect(0, height - 0.5, width, 0);
  pen.beginPath();
  points.forEach((value, i) => (i ? pen.lineTo(x(i), y(value)) : pen.moveTo(x(i), y(value))));
  pen.strokeStyle = color("accent");
  pen.lineWidth = 1.75;
  pen.lineJoin = "round";
  pen.stroke();
  pen.lineTo(width, height);
  pen.lineTo(x(0), height);
  pen.globalAlpha = 0.1;
  pen.fillStyle = color("accent");
  pen.fill();
}

function showBlocks(blocks) {
  const own = blocks.used - blocks.shared;
  const free = blocks.total - blocks.used - blocks.cached;
  show("n-used", String(own));
  show("n-shared", String(blocks.shared));
  show("n-cached", String(blocks.cached));
  show("n-free", String(free));
  const each = Math.max(1, Math.ceil(blocks.total / MAX_CELLS));
  const share = blocks.total ? Math.round((100 * blocks.used) / blocks.total) : 0;
  const tokens = blocks.size ? ` of ${blocks.size} tokens` : "";
  show("blocks", `${blocks.total.toLocaleString("en")} blocks${tokens}` + (each > 1 ? `, ${each} a cell` : "") + `, ${share}% in use`);
  const numCells = Math.ceil(blocks.total / each);
  const width = $("grid").clientWidth;
  const size = numCells > 480 ? 13 : numCells > 160 ? 16 : 20;
  const columns = Math.max(1, Math.floor((width + 3) / size));
  const rows = Math.max(1, Math.ceil(numCells / columns));
  const [pen] = canvasOf("grid", rows * size);
  // Whole cells by kind, in order; a kind that is there at all has one, so that few are seen among many.
  const kinds = [["shared", blocks.shared], ["used", own], ["cached", blocks.cached]];
  let cell = 0;
  const paint = (name, count) => {
    pen.fillStyle = color(name);
    for (const end = Math.min(numCells, cell + count); cell < end; cell++) {
      pen.beginPath();
      pen.roundRect((cell % columns) * size, Math.floor(cell / columns) * size, size - 3, size - 3, 3);
      pen.fill();
    }
  };
  for (const [name, count] of kinds) paint(name, Math.ceil(count / each));
  paint("free", numCells);
}

// Requests

// Where a request's time went: [class, label, seconds].
function partsOf(request) {
  const queue = request.queue_seconds || 0;
  const first = request.first_token_seconds === null ? request.seconds : request.first_token_seconds;
  return [
    ["queue", "in the queue", queue],
    ["prompt", "prompt", Math.max(0, first - queue)],
    ["decode", "generating", Math.max(0, request.seconds - Math.max(first, queue))],
  ];
}

function fillBar(bar, parts, longest) {
  const spans = parts.map(([name, , length]) => {
    const span = document.createElement("span");
    span.className = name;
    span.style.width = (100 * length) / longest + "%";
    return span;
  });
  bar.replaceChildren(...spans);
}

const COLUMNS = ["id", "", "n extra", "n extra", "n", "n extra", "n", "share extra"];
const rows = new Map(); // they are kept from look to look, so that focus and clicks survive

function rowOf(id) {
  const row = document.createElement("tr");
  row.tabIndex = 0;
  row.title = "Timeline of " + id;
  row.onclick = () => openTimeline(id);
  row.onkeydown = (event) => event.key === "Enter" && openTimeline(id);
  for (const name of COLUMNS) row.insertCell().className = name;
  row.cells[1].append(document.createElement("span"));
  row.cells[7].append(document.createElement("div"));
  row.cells[7].firstChild.className = "bar";
  return row;
}

function fillRow(row, request, longest) {
  const isPrompt = request.state !== "finished" && request.num_prompt_done < request.num_prompt_tokens;
  const texts = [
    request.id,
    null,
    isPrompt ? `${request.num_prompt_done} / ${request.num_prompt_tokens}` : String(request.num_prompt_tokens),
    String(request.num_cached_tokens),
    String(request.num_generated_tokens),
    seconds(request.first_token_seconds),
    seconds(request.seconds),
  ];
  texts.forEach((text, i) => {
    if (text !== null && row.cells[i].textContent !== text) row.cells[i].textContent = text;
  });
  const mark = row.cells[1].firstChild;
  mark.className = "mark " + (request.error ? "error" : request.state);
  mark.textContent = request.state === "finished" ? request.finish_reason || "error" : request.state;
  fillBar(row.cells[7].firstChild, partsOf(request), longest);
}

function showRequests(requests) {
  $("none").hidden = requests.length > 0;
  const longest = Math.max(...requests.map((request) => request.seconds), 1e-6);
  const shown = new Set(requests.map((request) => request.id));
  for (const [id, row] of rows) {
    if (shown.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  requests.forEach((request, i) => {
    if (!rows.has(request.id)) rows.set(request.id, rowOf(request.id));
    const row = rows.get(request.id);
    if ($("requests").rows[i] !== row) $("requests").insertBefore(row, $("requests").rows[i] || null);
    fillRow(row, request, longest);
  });
}

async function timelineOf(id) {
  return (await call("/requests/" + id.split("/").map(encodeURIComponent).join("/"))).json();
}

async function openTimeline(id) {
  try {
    showTimeline(await timelineOf(id));
  } catch (error) {
    showTimeline({ id, events: [], error: error.message, state: "finished", seconds: 0, first_token_seconds: null });
  }
  if (!$("timeline").open) $("timeline").showModal();
}

async function followTimeline() {
  const id = opened;
  const request = await timelineOf(id);
  if (opened === id) showTimeline(request);
}

function factsOf(request) {
  if (!request.num_prompt_tokens) return "";
  const facts = [
    `${request.num_prompt_tokens} prompt tokens, ${request.num_cached_tokens} of them cached`,
    `${request.num_generated_tokens} generated` + (request.max_tokens ? ` of at most ${request.max_tokens}` : ""),
  ];
  const length = request.first_token_seconds === null ? 0 : request.seconds - request.first_token_seconds;
  if (length > 0) facts.push(`${number(request.num_generated_tokens / length)} a second`);
  if (request.n > 1) facts.push(`${request.n} samples`);
  if (request.num_preemptions) facts.push(`preempted ${request.num_preemptions}×`);
  if (request.user) facts.push(`user ${request.user}`);
  return facts.join(" · ");
}

function showTimeline(request) {
  show("t-name", request.id);
  show("t-error", request.error || "");
  opened = request.state === "finished" ? null : request.id;
  const parts = partsOf(request);
  fillBar($("t-bar"), parts, request.seconds || 1);
  show("t-facts", factsOf(request));
  $("t-parts").replaceChildren(
    ...parts.map(([name, label, length]) => {
      const item = document.createElement("li");
      const dot = document.createElement("i");
      dot.className = name;
      const figure = document.createElement("b");
      figure.textContent = seconds(length);
      item.append(dot, label + " ", figure);
      return item;
    }),
  );
  $("t-events").replaceChildren(
    ...request.events.map((event) => {
      const item = document.createElement("li");
      if (event.event === "engine died" || request.error && event.event === "finished") item.className = "bad";
      if (event.event === "preempted" || event.event === "waiting") item.className = "slow";
      const time = document.createElement("time");
      time.textContent = "+" + seconds(event.seconds);
      const name = document.createElement("b");
      name.textContent = event.event;
      const detail = document.createElement("span");
      detail.textContent = event.detail;
      item.append(time, name, detail);
      return item;
    }),
  );
}

$("t-close").onclick = () => $("timeline").close();
$("timeline").onclose = () => (opened = null);
$("timeline").onclick = (event) => event.target === $("timeline") && $("timeline").close();

// The chat box

function said(role, text) {
  if (!messages.length && role === "user") $("talk").replaceChildren();
  const bubble = document.createElement("div");
  bubble.className = "said " + role;
  bubble.textContent = text;
  $("talk").append(bubble);
  $("talk").scrollTop = $("talk").scrollHeight;
  return bubble;
}

async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// What a bubble shows: the model's reasoning, if it marks any, and its answer.
function write(bubble, delta) {
  const thought = delta.reasoning || "";
  if (thought && bubble.firstChild.className !== "thought") {
    const place = document.createElement("span");
    place.className = "thought";
    bubble.prepend(place);
  }
  if (thought) bubble.firstChild.append(thought);
  if (delta.content) bubble.append(delta.content);
}

function wishes() {
  const body = { messages, stream: true, stream_options: { include_usage: true }, user: "page" };
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("most").value !== "") body.max_tokens = Number($("most").value);
  return JSON.stringify(body);
}

function noteOf(id, usage, first, last) {
  const note = document.createElement("p");
  note.className = "note";
  if (usage && first) {
    const rate = last - first > 0.2 ? ` · ${number((usage.completion_tokens - 1) / (last - first))} a second` : "";
    note.append(`${usage.completion_tokens} tokens · first after ${seconds(first)}${rate} · `);
  }
  const about = document.createElement("button");
  about.type = "button";
  about.className = "about";
  about.textContent = "timeline";
  about.onclick = () => openTimeline(id);
  note.append(about);
  return note;
}

async function send(text) {
  said("user", text);
  messages.push({ role: "user", content: text });
  const bubble = said("assistant", "");
  bubble.append("");
  bubble.classList.add("open");
  const stop = (talking = new AbortController());
  $("send").textContent = "Stop";
  const begun = performance.now();
  const talk = messages;
  let reply = "";
  let id = null, usage = null, first = 0, last = 0;
  try {
    const headers = { "content-type": "application/json" };
    const answer = await call("/v1/chat/completions", { method: "POST", headers, body: wishes(), signal: stop.signal });
    for await (const data of eventsOf(answer)) {
      if (data.error) throw new Error(data.error.message);
      id = data.id;
      usage = data.usage || usage;
      const atEnd = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 40;
      for (const choice of data.choices) {
        last = (performance.now() - begun) / 1000;
        first = first || last;
        reply += choice.delta.content || "";
        write(bubble, choice.delta);
      }
      if (atEnd) $("talk").scrollTop = $("talk").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      bubble.append((reply ? "\n\n" : "") + error.message);
      bubble.classList.add("failed");
    }
  }
  bubble.classList.remove("open");
  if (reply) talk.push({ role: "assistant", content: reply });
  else talk.pop(); // a question without an answer is not asked again with the next
  if (id && talk === messages) {
    $("talk").append(noteOf(id, usage, first, last));
    $("talk").scrollTop = $("talk").scrollHeight;
  }
  talking = null;
  $("send").textContent = "Send";
  look();
}

$("say").onsubmit = (event) => {
  event.preventDefault();
  if (talking) {
    talking.abort();
    return;
  }
  const text = $("text").value.trim();
  if (!text) return;
  $("text").value = "";
  send(text);
};
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!talking) $("say").requestSubmit();
  }
};
$("clear").onclick = () => {
  if (talking) talking.abort();
  messages = [];
  const hint = document.createElement("p");
  hint.className = "empty";
  hint.textContent = "Messages stay in this page.";
  $("talk").replaceChildren(hint);
};

// Once a second

async function look() {
  try {
    const { engine, data } = await (await call("/requests?limit=60")).json();
    showEngine(engine);
    showRequests(data);
    if (opened) await followTimeline();
  } catch (error) {
    showState("away", error instanceof TypeError ? "out of reach" : error.message);
  }
}

async function watch() {
  if (!document.hidden && !$("ask").open) await look();
  setTimeout(watch, EVERY);
}

watch();
