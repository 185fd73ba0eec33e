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

// Talking to the server

async function call(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.authorization = "Bearer " + key;
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) askForKey();
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Error((body.error && body.error.message) || "the server answered " + answer.status);
  }
  return answer;
}

function askForKey() {
  if (!$("ask").open) $("ask").showModal();
}

$("key").onclick = askForKey;
$("ask-form").onsubmit = (event) => {
  event.preventDefault();
  key = $("ask-key").value.trim();
  sessionStorage.setItem("octavo.key", key);
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
  show("swapped", engine.num_swapped ? `· ${engine.num_swapped} swapped out` : "");
  show("generated", number(engine.rates.generated));
  show("computed", number(engine.rates.computed));
  show("first50", seconds(engine.latencies.first_token.p50));
  show("first95", seconds(engine.latencies.first_token.p95));
  show("gap50", seconds(engine.latencies.between_tokens.p50));
  show("gap95", seconds(engine.latencies.between_tokens.p95));
  const cached = engine.totals.num_cached_prompt_tokens || 0;
  const done = cached + (engine.totals.num_computed_prompt_tokens || 0);
  show("hits", done ? Math.round((100 * cached) / done) + "%" : "–");
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
  const tokens = blocks.size ? ` of ${blocks.size} tokens` : "";
  show("blocks", `${blocks.total.toLocaleString("en")} blocks${tokens}` + (each > 1 ? `, ${each} a cell` : ""));
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

function cellOf(text, className) {
  const cell = document.createElement("td");
  cell.textContent = text;
  if (className) cell.className = className;
  return cell;
}

function rowOf(request) {
  const row = document.createElement("tr");
  row.tabIndex = 0;
  row.onclick = () => openTimeline(request.id);
  row.onkeydown = (event) => event.key === "Enter" && openTimeline(request.id);
  const mark = document.createElement("span");
  mark.className = "mark " + (request.error ? "error" : request.state);
  mark.textContent = request.state === "finished" ? request.finish_reason : request.state;
  const state = document.createElement("td");
  state.append(mark);
  const done = request.state !== "finished" && request.num_prompt_done < request.num_prompt_tokens;
  row.append(
    cellOf(request.id, "id"),
    state,
    cellOf(done ? `${request.num_prompt_done} / ${request.num_prompt_tokens}` : String(request.num_prompt_tokens), "n"),
    cellOf(String(request.num_cached_tokens), "n"),
    cellOf(String(request.num_generated_tokens), "n"),
    cellOf(seconds(request.first_token_seconds), "n"),
    cellOf(seconds(request.seconds), "n"),
  );
  row.title = request.id;
  return row;
}

function showRequests(requests) {
  $("none").hidden = requests.length > 0;
  $("requests").replaceChildren(...requests.map(rowOf));
}

async function openTimeline(id) {
  try {
    const answer = await call("/requests/" + id.split("/").map(encodeURIComponent).join("/"));
    showTimeline(await answer.json());
  } catch (error) {
    showTimeline({ id, events: [], error: error.message, seconds: 0, queue_seconds: 0 });
  }
  if (!$("timeline").open) $("timeline").showModal();
}

function showTimeline(request) {
  show("t-name", request.id);
  show("t-error", request.error || "");
  const queue = request.queue_seconds || 0;
  const first = request.first_token_seconds;
  const parts = [
    ["queue", "in the queue", queue],
    ["prompt", "prompt", first === null || first === undefined ? Math.max(0, request.seconds - queue) : first - queue],
    ["decode", "generating", first === null || first === undefined ? 0 : request.seconds - first],
  ];
  $("t-bar").replaceChildren(
    ...parts.filter((part) => part[2] > 0).map(([name, , length]) => {
      const span = document.createElement("span");
      span.className = name;
      span.style.flexGrow = String(length);
      return span;
    }),
  );
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

async function send(text) {
  said("user", text);
  messages.push({ role: "user", content: text });
  const bubble = said("assistant", "");
  bubble.classList.add("open");
  const stop = (talking = new AbortController());
  $("send").textContent = "Stop";
  let reply = "";
  let id = null;
  try {
    const answer = await call("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ messages, stream: true, user: "page" }),
      signal: stop.signal,
    });
    for await (const data of eventsOf(answer)) {
      if (data.error) throw new Error(data.error.message);
      id = data.id;
      for (const choice of data.choices) reply += (choice.delta && choice.delta.content) || "";
      const atEnd = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 40;
      bubble.textContent = reply;
      if (atEnd) $("talk").scrollTop = $("talk").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      bubble.textContent = reply ? reply + "\n\n" + error.message : error.message;
      bubble.classList.add("failed");
    }
  }
  bubble.classList.remove("open");
  messages.push({ role: "assistant", content: reply });
  if (id) {
    const about = document.createElement("button");
    about.type = "button";
    about.className = "about";
    about.textContent = "timeline";
    about.onclick = () => openTimeline(id);
    $("talk").append(about);
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
  } catch (error) {
    showState("away", error instanceof TypeError ? "out of reach" : "no access");
  }
}

async function watch() {
  if (!document.hidden && !$("ask").open) await look();
  setTimeout(watch, EVERY);
}

watch();
