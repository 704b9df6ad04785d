"use strict";

const $ = (id) => document.getElementById(id);
const POINTS = 60;
const LOAD_EVERY = 2000; // milliseconds
const TABS = ["complete", "chat", "listen"];
let models = [];
let mode = "complete";
let turns = []; // of the conversation
let picture = null; // of the next turn, as a data URL
let running = null; // the AbortController of what runs
let last = null; // the body of the last request, to be measured

// ---- asking the server ----

class Refused extends Error {
  constructor(status, error, retry) {
    super(error && error.message ? error.message : `the server answered ${status}`);
    this.status = status;
    this.retry = retry;
  }
}

async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  const key = $("key").value.trim();
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers });
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, body.error, answer.headers.get("Retry-After"));
  }
  return answer;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.code === "timeout" ? 504 : 500, event.error);
      yield event;
    }
  }
}

function tell(error) {
  if (error && error.name === "AbortError") return;
  let text = error ? error.message : "";
  if (error instanceof TypeError) text = "The server cannot be reached.";
  if (error && error.status === 401) {
    text = "This server wants an API key: write it into the settings.";
    $("settings").open = true;
    $("key").focus();
  }
  if (error && error.status === 429) text = `The server is busy: ${text} Try again in ${error.retry || 1} s.`;
  if (error && error.status === 503) text = `The server cannot do this now: ${text}`;
  $("alert").textContent = text;
  $("alert").hidden = !text;
}

// ---- what is asked ----

function settings() {
  const body = { model: $("model").value };
  const form = $("options").elements;
  for (const name of ["max_tokens", "temperature", "top_p", "top_k", "seed", "num_beams", "frequency_penalty", "presence_penalty", "num_assistant_tokens"]) {
    const field = form[name];
    if (field.value === "" || field.disabled) continue;
    if (!field.checkValidity()) {
      field.reportValidity();
      throw new Error(`${field.closest("label").firstChild.textContent.trim()}: ${field.validationMessage}`);
    }
    body[name] = Number(field.value);
  }
  if (form.stop.value) body.stop = form.stop.value.replaceAll("\\n", "\n");
  if (form.schedule.value && !form.schedule.disabled) body.schedule = form.schedule.value;
  if (form.prediction.value && !form.prediction.disabled) body.prediction = { type: "content", content: form.prediction.value };
  if (!form.speculate.checked) withoutDraft(body);
  if (form.schema.value.trim()) {
    let schema;
    try {
      schema = JSON.parse(form.schema.value);
    } catch (error) {
      throw new Error(`The schema is not JSON: ${error.message}`);
    }
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return body;
}

function withoutDraft(body) {
  body.speculate = false;
  for (const field of ["schedule", "num_assistant_tokens", "prediction"]) delete body[field];
}

function request() {
  const text = $("prompt").value;
  const body = settings();
  const content = picture ? [{ type: "image_url", image_url: { url: picture } }, { type: "text", text }] : text;
  if (mode === "chat") return { path: "/v1/chat/completions", body: { ...body, messages: [...turns, { role: "user", content }] } };
  return { path: "/v1/completions", body: { ...body, prompt: text } };
}

function choosePicture() {
  picture = null;
  const [file] = $("picture").files;
  if (!file) return;
  const reader = new FileReader();
  reader.onload = () => { picture = reader.result; };
  reader.readAsDataURL(file);
}

// ---- text as it comes ----

async function run({ path, body }, show) {
  const began = performance.now();
  const found = { text: "", tokens: 0, first: null, seconds: 0, figures: null, cached: 0 };
  const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
  if (card().details) streamed.return_drafted = streamed.return_metrics = true;
  const answer = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(streamed),
    signal: running.signal,
  });
  for await (const event of events(answer)) {
    const choice = event.choices[0];
    if (choice) {
      const text = (choice.delta ? choice.delta.content : choice.text) || "";
      const thoughts = (choice.delta && choice.delta.reasoning_content) || "";
      if (found.first === null && text) found.first = performance.now() - began;
      found.text += text;
      show(choice.drafted && choice.drafted.length ? choice.drafted : [[thoughts + text, false]], choice.tokens);
      if (choice.finish_reason) found.finish = choice.finish_reason;
    } else {
      found.figures = event.metrics && event.metrics.speculative_decoding;
      found.tokens = event.usage.completion_tokens;
      found.cached = event.usage.prompt_tokens_details.cached_tokens;
    }
  }
  found.seconds = (performance.now() - began) / 1000;
  return found;
}

function writer(place) {
  const began = performance.now();
  let count = 0;
  let shown = began;
  return (spans, tokens) => {
    const low = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
    for (const [text, drafted] of spans) {
      const span = document.createElement("span");
      span.className = drafted ? "drafted" : "own";
      span.textContent = text;
      place.append(span);
    }
    count += tokens;
    if (low) place.scrollTop = place.scrollHeight;
    const now = performance.now();
    if (now - shown > 500) {
      shown = now;
      const seconds = (now - began) / 1000;
      note("speed", count / seconds);
      $("figures").textContent = `${count} tokens in ${seconds.toFixed(1)} s …`;
    }
  };
}

function inWords(found) {
  const speed = found.tokens / found.seconds;
  const parts = [`${found.tokens} tokens in ${found.seconds.toFixed(2)} s: ${speed.toFixed(1)} per second`];
  if (found.first !== null) parts.push(`first after ${found.first.toFixed(0)} ms`);
  if (found.cached) parts.push(`${found.cached} prompt tokens were read before`);
  const f = found.figures;
  let lines = parts.join(" · ");
  if (f && f.num_draft_tokens) {
    lines += `\n${f.num_accepted_draft_tokens} of ${f.num_draft_tokens} drafted tokens accepted (${(100 * f.draft_acceptance_rate).toFixed(0)}%), mean acceptance length ${f.mean_acceptance_length.toFixed(2)}`;
    const plain = (found.tokens * f.verify_seconds) / f.num_target_passes;
    const ratio = plain / (f.draft_seconds + f.verify_seconds);
    lines += `\n${f.num_target_passes} passes of the model instead of ${found.tokens}; estimate: ${ratio >= 1 ? `${ratio.toFixed(2)}× faster than without the draft` : `${(1 / ratio).toFixed(2)}× slower than without the draft`}`;
  }
  if (found.finish === "length") lines += "\nended at its limit of tokens or time";
  return lines;
}

function busy(on) {
  for (const id of ["send", "hear"]) $(id).disabled = on;
  for (const id of ["stop", "hush"]) $(id).disabled = !on;
  $("measure").disabled = on || !last || !card().drafts;
  $("output").setAttribute("aria-busy", on);
}

// Does `work`, which the buttons and Escape stop; `figures` are where that is told.
async function doing(figures, work) {
  tell(null);
  running = new AbortController();
  busy(true);
  try {
    await work();
  } catch (error) {
    $(figures).textContent = error.name === "AbortError" ? "stopped" : "";
    tell(error);
  } finally {
    running = null;
    busy(false);
  }
}

async function send() {
  const asked = request();
  const [inChat, said] = [mode === "chat", $("prompt").value]; // both may change while the answer comes
  const place = $("output");
  place.textContent = "";
  if (!inChat) {
    const given = document.createElement("span");
    given.className = "given";
    given.textContent = asked.body.prompt;
    place.append(given);
  }
  const found = await run(asked, writer(place));
  last = asked;
  $("figures").textContent = inWords(found);
  note("speed", found.tokens / found.seconds);
  if (found.figures && found.figures.num_draft_tokens) note("acceptance", 100 * found.figures.draft_acceptance_rate);
  if (inChat) {
    turns = [...asked.body.messages, { role: "assistant", content: found.text }];
    addTurn("You", said);
    addTurn("Model", ...place.childNodes);
    if ($("prompt").value === said) emptyPrompt();
  }
}

function emptyPrompt() {
  $("prompt").value = $("picture").value = "";
  picture = null;
}

async function measure() {
  const speeds = {};
  for (const [name, speculate] of [["with the draft", true], ["without", false]]) {
    $("figures").textContent = `measuring ${name} …`;
    const body = { ...last.body, speculate, seed: last.body.seed ?? 0 };
    if (!speculate) withoutDraft(body);
    const found = await run({ path: last.path, body }, () => {});
    speeds[name] = found.tokens / found.seconds;
  }
  const ratio = speeds["with the draft"] / speeds.without;
  $("figures").textContent = `measured: ${speeds["with the draft"].toFixed(1)} tokens per second with the draft, ${speeds.without.toFixed(1)} without: ${ratio.toFixed(2)}×`;
}

function addTurn(who, ...content) {
  const turn = document.createElement("div");
  turn.className = "turn text";
  const name = document.createElement("b");
  name.textContent = who;
  turn.append(name, ...content);
  $("turns").append(turn);
}

// ---- sound ----

let recorder = null;

async function transcribe(blob, name) {
  $("transcript").textContent = "";
  $("sound-figures").textContent = "listening …";
  const began = performance.now();
  const form = new FormData();
  form.append("file", blob, name);
  form.append("model", $("model").value);
  form.append("response_format", $("form").value);
  const translate = $("translate").checked;
  if ($("language").value && !translate) form.append("language", $("language").value);
  const path = `/v1/audio/${translate ? "translations" : "transcriptions"}`;
  const answer = await ask(path, { method: "POST", body: form, signal: running.signal });
  const text = await answer.text();
  $("transcript").textContent = $("form").value === "verbose_json" ? JSON.stringify(JSON.parse(text), null, 1) : text;
  $("sound-figures").textContent = `in ${((performance.now() - began) / 1000).toFixed(2)} s`;
}

// Browsers record in forms that servers do not read: everything is made a wav file of 16 kHz here.
async function asWav(blob) {
  const context = new AudioContext();
  const sound = await context.decodeAudioData(await blob.arrayBuffer());
  await context.close();
  const rate = 16000;
  const offline = new OfflineAudioContext(1, Math.max(1, Math.ceil(sound.duration * rate)), rate);
  const source = offline.createBufferSource();
  source.buffer = sound;
  source.connect(offline.destination);
  source.start();
  const samples = (await offline.startRendering()).getChannelData(0);
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const write = (at, text) => [...text].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  write(0, "RIFF"); view.setUint32(4, 36 + 2 * samples.length, true); write(8, "WAVEfmt ");
  view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true);
  view.setUint32(24, rate, true); view.setUint32(28, 2 * rate, true); view.setUint16(32, 2, true); view.setUint16(34, 16, true);
  write(36, "data"); view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, i) => view.setInt16(44 + 2 * i, Math.round(32767 * Math.max(-1, Math.min(1, value))), true));
  return new Blob([view], { type: "audio/wav" });
}

async function record() {
  if (recorder) return recorder.stop();
  try {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    const parts = [];
    recorder = new MediaRecorder(stream);
    recorder.ondataavailable = (event) => parts.push(event.data);
    recorder.onstop = () => {
      stream.getTracks().forEach((track) => track.stop());
      recorder = null;
      $("record").textContent = "Record";
      $("record").setAttribute("aria-pressed", "false");
      $("heard").textContent = "";
      if (running) tell(new Error("Something runs already: stop it, and record again."));
      else doing("sound-figures", async () => transcribe(await asWav(new Blob(parts)), "recording.wav"));
    };
    recorder.start();
    $("record").textContent = "Stop and transcribe";
    $("record").setAttribute("aria-pressed", "true");
    $("heard").textContent = "recording …";
  } catch (error) {
    recorder = null;
    tell(new Error(`The microphone cannot be used: ${error.message || "there is none, or the page is not secure"}`));
  }
}

async function hear() {
  const file = $("file").files[0];
  if (!file) throw new Error("Choose a recording first.");
  const readable = /\.(wav|flac|mp3|ogg|oga|opus)$/i.test(file.name);
  const blob = readable ? file : await asWav(file).catch(() => file);
  await transcribe(blob, blob === file ? file.name : "recording.wav");
}

// ---- live figures ----

const series = { speed: [], acceptance: [], queue: [] };

function note(name, ...values) {
  series[name] = [...series[name], values].slice(-POINTS);
  const words = {
    speed: ([speed]) => speed.toFixed(1),
    acceptance: ([share]) => `${share.toFixed(0)}%`,
    queue: ([active, waiting]) => `${active} and ${waiting}`,
  };
  $(`now-${name}`).textContent = words[name](values);
  plot(name);
}

function plot(name) {
  const svg = $(`plot-${name}`);
  const points = series[name];
  const most = Math.max(name === "acceptance" ? 100 : 1, ...points.flat());
  svg.setAttribute("viewBox", `0 0 ${POINTS - 1} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.textContent = "";
  const width = (points[0] || []).length;
  for (let line = 0; line < width; line++) {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const at = (i) => `${POINTS - points.length + i} ${95 - (90 * points[i][line]) / most}`;
    path.setAttribute("d", points.length > 1 ? `M${points.map((_, i) => at(i)).join("L")}` : `M${at(0)}h-1`);
    if (line) path.setAttribute("class", "second");
    svg.append(path);
  }
}

async function look() {
  if (document.hidden) return;
  try {
    const load = await (await ask("/v1/load")).json();
    const own = load[$("model").value];
    if (own) note("queue", own.running, own.waiting);
    show("ready", "good");
  } catch (error) {
    show(error.status === 401 ? "key needed" : error.status ? "refused" : "not reached", "bad");
  }
}

function show(text, kind) {
  $("state").textContent = text;
  $("state").className = `pill ${kind}`;
}

// ---- models and modes ----

function card() {
  const found = models.find((one) => one.id === $("model").value);
  return found ? found.specdec : { task: "text" };
}

async function loadModels() {
  try {
    models = (await (await ask("/v1/models")).json()).data;
    tell(null);
  } catch (error) {
    return tell(error);
  }
  const before = $("model").value;
  $("model").textContent = "";
  for (const one of models) $("model").append(new Option(one.id, one.id));
  if (models.some((one) => one.id === before)) $("model").value = before;
  chosen();
}

function chosen() {
  const own = card();
  $("card").textContent = own.draft ? `draft: ${own.draft}, ${own.backend}` : "no draft";
  const modes = own.task === "speech" ? ["listen"] : own.chat ? ["complete", "chat"] : ["complete"];
  for (const name of TABS) $(`tab-${name}`).hidden = !modes.includes(name);
  choose(modes.includes(mode) ? mode : modes[modes.length - 1]);
  const form = $("options").elements;
  for (const name of ["speculate", "schedule", "num_assistant_tokens"]) form[name].disabled = !own.drafts;
  last = null;
  busy(Boolean(running));
  look();
}

function choose(name) {
  mode = name;
  for (const one of TABS) {
    const on = one === name;
    $(`tab-${one}`).setAttribute("aria-selected", on);
    $(`tab-${one}`).tabIndex = on ? 0 : -1;
  }
  $("text-panel").hidden = name === "listen";
  $("text-panel").setAttribute("aria-labelledby", `tab-${name}`);
  $("listen-panel").hidden = name !== "listen";
  $("turns").hidden = $("picture-label").hidden = name !== "chat";
  $("prompt-label").textContent = name === "chat" ? "Your message" : "Text to continue";
}

function theme(next) {
  if (next) document.documentElement.dataset.theme = next;
  try {
    if (next) localStorage.setItem("theme", next);
  } catch { /* kept for this visit only */ }
}

function begin() {
  try {
    theme(localStorage.getItem("theme"));
    $("key").value = sessionStorage.getItem("key") || "";
  } catch { /* nothing is kept */ }
  $("work").classList.add("coloured");
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); if (!running) doing("figures", send); });
  $("listen").addEventListener("submit", (event) => { event.preventDefault(); if (!running) doing("sound-figures", hear); });
  $("options").addEventListener("submit", (event) => event.preventDefault());
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); if (!running) doing("figures", send); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
  for (const id of ["stop", "hush"]) $(id).addEventListener("click", () => running && running.abort());
  $("measure").addEventListener("click", () => doing("figures", measure));
  $("clear").addEventListener("click", () => {
    turns = [];
    last = null;
    for (const id of ["turns", "output", "figures"]) $(id).textContent = "";
    emptyPrompt();
    $("prompt").focus();
    tell(null);
    busy(Boolean(running));
  });
  $("record").addEventListener("click", record);
  $("colours").addEventListener("change", () => $("work").classList.toggle("coloured", $("colours").checked));
  $("picture").addEventListener("change", choosePicture);
  $("model").addEventListener("change", chosen);
  $("key").addEventListener("change", () => {
    try { sessionStorage.setItem("key", $("key").value); } catch { /* kept for this page only */ }
    loadModels();
  });
  $("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).getPropertyValue("--page").trim() === "#14171a";
    theme(dark ? "light" : "dark");
  });
  for (const name of TABS) {
    $(`tab-${name}`).addEventListener("click", () => choose(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const open = TABS.filter((one) => !$(`tab-${one}`).hidden);
      if (!step) return;
      const next = open[(open.indexOf(name) + step + open.length) % open.length];
      choose(next);
      $(`tab-${next}`).focus();
    });
  }
  loadModels();
  setInterval(look, LOAD_EVERY);
}

begin();
