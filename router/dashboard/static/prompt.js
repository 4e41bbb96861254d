// Prompt: whose cache holds this prompt, and whom would the policy choose? Asked while one types.
// Blocks come from POST /index/rank, the policy's order from POST /dashboard/weigh.

import { byId, count, fill, h, many } from "./dom.js";
import { ask } from "./net.js";

const SETTLE_MS = 250; // after the last key
const AGAIN_MS = 2000; // what is held changes while one looks
const MOST_CELLS = 240; // more blocks than this share cells

let models = [];
let running = null;
let timer = 0;

export function watchPrompt() {
  byId("ask").addEventListener("submit", (event) => event.preventDefault());
  byId("ask-text").addEventListener("input", () => soon(SETTLE_MS));
  byId("ask").addEventListener("change", () => soon(0));
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select, dialog");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      byId("ask-text").focus();
    }
  });
}

export function served(names) {
  if (names.join("\n") === models.join("\n")) return;
  models = names;
  const chosen = byId("ask-model").value;
  byId("ask-model").replaceChildren(...names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
  byId("ask-model").parentElement.hidden = names.length < 2;
  soon(0);
}

function soon(wait) {
  clearTimeout(timer);
  timer = setTimeout(look, wait);
}

async function look() {
  const text = byId("ask-text").value;
  running?.abort();
  if (!text.trim()) {
    fill(byId("answer"));
    fill(byId("prompt-note"));
    return;
  }
  const mine = (running = new AbortController());
  try {
    const { path, body } = question(text);
    const [ranked, weighed] = await Promise.all([
      ask("index/rank", { body: { ...body, salt: body.cache_salt ?? body.salt ?? "" }, signal: mine.signal }),
      ask("dashboard/weigh", { body: { path, body }, signal: mine.signal }).catch((error) => ({ error })),
    ]);
    if (running === mine) show(path, ranked, weighed);
  } catch (error) {
    if (mine.signal.aborted) return;
    fill(byId("prompt-note"));
    fill(byId("answer"), h("p", { class: "fault" }, error.message));
  }
  if (running === mine && !document.hidden) soon(AGAIN_MS);
}

// What is typed, as a request: JSON that is a body or a list of messages as it stands, else text.
function question(text) {
  const model = byId("ask-model").value || models[0] || "";
  let told = null;
  if (/^\s*[[{]/.test(text)) {
    try {
      told = JSON.parse(text);
    } catch { /* text that begins like JSON is a prompt, too */ }
  }
  if (Array.isArray(told) && told.length && told.every((one) => one && typeof one === "object" && "role" in one)) {
    return { path: "/v1/chat/completions", body: { model, messages: told } };
  }
  if (told && !Array.isArray(told) && ("messages" in told || "prompt" in told)) {
    return { path: "messages" in told ? "/v1/chat/completions" : "/v1/completions", body: { ...told, model: told.model ?? model } };
  }
  if (byId("ask").elements.as.value === "plain") return { path: "/v1/completions", body: { model, prompt: text } };
  return { path: "/v1/chat/completions", body: { model, messages: [{ role: "user", content: text }] } };
}

function show(path, ranked, weighed) {
  const kind = path.endsWith("chat/completions") ? "read as a chat" : "read as a plain prompt";
  fill(byId("prompt-note"), `${kind} · ${many(ranked.blocks, "block")} of ${ranked.block_size} tokens`);
  fill(byId("answer"), verdict(weighed), h("p", { class: "shape" },
    ranked.blocks ? "Held from the start of the prompt, block by block" : "Shorter than one block: nothing of it can be held yet"),
  h("ul", { class: "held" }, ordered(ranked.workers, weighed).map((one) => line(one, weighed))));
}

function verdict(weighed) {
  if (weighed.error) return h("div", { class: "verdict", data: { tone: "warn" } }, h("b", {}, "Nobody would be chosen: "), weighed.error.message);
  if (!weighed.chosen) return h("div", { class: "verdict", data: { tone: "warn" } }, h("b", {}, "Nobody would be chosen: "), weighed.why_none);
  const [prefill, decode] = weighed.chosen;
  const chance = weighed.prefill.by_chance ? " Another draw may fall otherwise." : "";
  return h("div", { class: "verdict" },
    h("b", {}, prefill === decode ? prefill : `${prefill} → ${decode}`), " would be chosen now.",
    h("p", {}, `${weighed.prefill.sentence}.${chance}`),
    weighed.not_tokenised ? h("p", {}, `Its tokens are not known to the policy: ${weighed.not_tokenised}.`) : null);
}

// Those the policy would ask first, in its order; then the rest, deepest first as rank gives them.
function ordered(workers, weighed) {
  const place = new Map((weighed.prefill?.order ?? []).map((one, at) => [one.worker, at]));
  return [...workers].sort((one, other) => (place.get(one.worker) ?? 1e6) - (place.get(other.worker) ?? 1e6));
}

function line(one, weighed) {
  const weight = weighed.prefill?.order.find((other) => other.worker === one.worker);
  const role = weighed.decode?.order.some((other) => other.worker === one.worker) ? "decode" : "";
  const chosen = weighed.chosen?.[0] === one.worker;
  const lower = ["cpu", "disk", "remote"].filter((tier) => one.tiers[tier]).map((tier) => `${one.tiers[tier]} of them on ${tier}`);
  const facts = [
    `${one.depth_blocks} of ${many(one.blocks, "block")} held`, ...lower,
    weight?.cost !== undefined ? `${many(weight.to_compute, "token")} to compute + ${count(weight.inflight_tokens)} in flight = ${count(weight.cost)}` : "",
    weight && weight.cost === undefined ? `${many(weight.inflight_tokens, "token")} in flight` : "",
    weight && weight.share < 1 ? "new or just back: a smaller share" : "",
    one.knowledge === "exact" ? "" : `knowledge ${one.knowledge}${one.reason ? `: ${one.reason}` : ""}`,
  ].filter(Boolean);
  return h("li", { data: { worker: one.worker, held: one.depth_blocks, blocks: one.blocks } },
    h("span", { class: "name" }, one.worker, h("span", { class: chosen ? "sub chosen" : "sub" }, chosen ? "chosen" : role || (weight ? "" : "not asked"))),
    strip(one), h("span", { class: "facts" }, facts.join(" · ")));
}

function strip({ worker, blocks, depth_blocks: held }) {
  const cells = Math.min(blocks, MOST_CELLS);
  const each = blocks / Math.max(1, cells);
  const facts = { class: cells > 90 ? "strip many" : "strip", role: "img", "aria-label": `${held} of ${blocks} blocks held by ${worker}` };
  return h("div", facts, Array.from({ length: cells }, (_, at) => {
    const part = Math.max(0, Math.min(1, (held - at * each) / each));
    if (part >= 1) return h("i", { class: "on" });
    return part > 0 ? h("i", { class: "part", vars: { "--share": `${(part * 100).toFixed(0)}%` } }) : h("i", {});
  }));
}
