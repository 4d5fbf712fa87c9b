#include "serve/page.h"

namespace sinkhorn::serve {
namespace {

constexpr const char* kGenerate = R"js(
const $ = id => document.getElementById(id);
let running = null;  // what stops the request

function tell(node, text, wrong) {
  node.textContent = text;
  node.className = wrong ? "wrong" : "quiet";
}

async function post(path, body, signal) {
  const response = await fetch(path, {method: "POST", signal, body: JSON.stringify(body),
    headers: {"Content-Type": "application/json"}});
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new Error(answer?.error?.message ?? "the server answered " + response.status);
}

function request() {
  const body = {stream: true};
  if ($("prompt").value) body.prompt = $("prompt").value;
  if ($("stop").value) body.stop = $("stop").value;
  for (const id of ["max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed"]) {
    if ($(id).value !== "") body[id] = Number($(id).value);
  }
  return body;
}

// The objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the connection was closed");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

const ENDS = {stop: "the text is complete", length: "as many tokens as there may be",
  timeout: "the time limit", interrupted: "the server ended"};

async function generate() {
  if (running) return;
  running = new AbortController();
  $("go").disabled = true;
  $("halt").disabled = false;
  $("whole").disabled = true;
  const body = request();
  $("given").textContent = body.prompt ?? "";
  $("made").textContent = "";
  tell($("status"), "waiting for a free slot");
  try {
    let end = "";
    for await (const event of events(await post("v1/completions", body, running.signal))) {
      if (event.error) throw new Error(event.error.message);
      $("made").textContent += event.choices[0].text;
      end = event.choices[0].finish_reason;
      tell($("status"), "writing");
    }
    tell($("status"), "done: " + (ENDS[end] ?? end));
  } catch (error) {
    if (running.signal.aborted) tell($("status"), "stopped");
    else tell($("status"), error.message, true);
  }
  running = null;
  $("go").disabled = false;
  $("halt").disabled = true;
  $("whole").disabled = !$("made").textContent;
}

$("go").addEventListener("click", generate);
$("halt").addEventListener("click", () => running?.abort());
$("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
});
)js";

constexpr const char* kSorting = R"js(
const SVG = "http://www.w3.org/2000/svg";
function svg(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}
function element(name, text) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  return node;
}
const percent = share => (100 * share).toFixed(1) + "%";

// A picture element an entry; over it a strip a row that says what the row reads.
function map(head, blocks) {
  const size = blocks.length;
  const node = svg("svg", {class: "map", viewBox: `0 0 ${size} ${size}`, role: "img",
    "aria-label": "sorting matrix of head " + head.head});
  node.append(svg("image", {width: size, height: size, href: "data:image/png;base64," + head.png}));
  head.sources.forEach((sources, row) => {
    const strip = svg("rect", {x: 0, y: row, width: size, height: 1});
    const title = svg("title", {});
    const read = sources.map(([block, share]) =>
      `block ${block} (${percent(share)}): ${blocks[block]}`).join("\n");
    title.textContent = `block ${row}: ${blocks[row]}\nreads ${read || "nothing much"}`;
    strip.append(title);
    node.append(strip);
  });
  return node;
}

function figure(head, blocks) {
  const node = element("figure"), caption = element("figcaption");
  caption.append(element("b", "head " + head.head),
    element("span", "largest " + percent(head.largest)),
    element("span", "entropy " + head.entropy.toFixed(2) + " bits"),
    element("span", "elsewhere " + percent(head.elsewhere)));
  node.append(map(head, blocks), caption);
  return node;
}

let asked = 0, sorting = false, wanted = null;
async function sort(text, what) {
  const number = ++asked;
  try {
    const found = text ? await (await post("v1/sorting", {text})).json() : {layers: [], blocks: []};
    if (number !== asked) return;
    $("layers").replaceChildren(...found.layers.flatMap(layer => {
      const maps = element("div");
      maps.className = "maps";
      maps.append(...layer.heads.map(head => figure(head, found.blocks)));
      return [element("h4", "layer " + layer.layer), maps];
    }));
    if (!text) tell($("sorted"), "Type some text.");
    else if (!found.layers.length) tell($("sorted"), "Nothing in this model sorts.");
    else tell($("sorted"), `${what}: ${found.blocks.length} blocks of ${found.block} tokens`);
  } catch (error) {
    if (number === asked) tell($("sorted"), error.message, true);
  }
}

// The newest text alone, one request at a time.
async function sort_newest(text, what) {
  wanted = [text, what];
  if (sorting) return;
  sorting = true;
  while (wanted) {
    const next = wanted;
    wanted = null;
    await sort(...next);
  }
  sorting = false;
}

let pause = 0;
$("prompt").addEventListener("input", () => {
  clearTimeout(pause);
  pause = setTimeout(() => sort_newest($("prompt").value, "the text typed"), 300);
});
$("whole").addEventListener("click", () =>
  sort_newest($("given").textContent + $("made").textContent, "typed and generated"));
if ($("prompt").value) sort_newest($("prompt").value, "the text typed");
)js";

}  // namespace

std::string page_script() { return std::string(kGenerate) + kSorting; }

}  // namespace sinkhorn::serve
