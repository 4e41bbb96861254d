// Fleet: one row per worker: is it well, how busy, how far known, what it holds, how right we are.

import { byId, count, fill, h, many, seconds, share, sum } from "./dom.js";

const TIERS = ["gpu", "cpu", "disk", "remote"];
const TONES = {
  serving: "ok", draining: "warn", lost: "bad", unhealthy: "bad", waiting: "bad",
  closed: "ok", probing: "warn", open: "bad",
  exact: "ok", partial: "warn", dark: "bad", off: "none",
};

export function fleet({ workers, policies }) {
  const place = byId("fleet-body");
  fill(byId("fleet-note"), workers.length ? `prefill by ${policies.prefill}, decode by ${policies.decode}` : "");
  if (!workers.length) {
    fill(place, h("p", { class: "empty" }, "No worker yet. Start engines, or name them with ",
      h("code", {}, "--prefill"), " and ", h("code", {}, "--decode"), "."));
    return;
  }
  const busiest = Math.max(1, ...workers.map((one) => one.inflight_tokens ?? 0));
  const fullest = Math.max(1, ...workers.map(held));
  const names = ["Worker", "State", "In flight", "Circuit", "Knowledge", "Blocks held", "Cached, foretold → found"];
  fill(place, h("div", { class: "scroll" }, h("table", { class: "fold" },
    h("caption", { class: "aside" }, "Workers"),
    h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, workers.map((one) => row(one, busiest, fullest))))));
}

const held = (worker) => sum(Object.values(worker.blocks ?? {}));

function row(worker, busiest, fullest) {
  const facts = { data: { worker: worker.worker, state: worker.state, role: worker.role, knowledge: worker.knowledge } };
  const name = h("th", { scope: "row" }, h("span", { class: "who" }, worker.worker),
    h("span", { class: "sub" }, [worker.role, worker.engine, worker.model].filter(Boolean).join(" · ")));
  if (worker.state === "waiting") {
    return h("tr", facts, name, cell("State", word("waiting"), reason(worker.trouble, "bad")),
      h("td", { colspan: 5, class: "wide" }));
  }
  return h("tr", facts, name,
    cell("State", word(worker.state), reason(worker.state === "serving" ? "" : worker.trouble, TONES[worker.state])),
    cell("In flight", many(worker.inflight_tokens, "token"), bar([worker.inflight_tokens], busiest),
      note(many(worker.inflight_requests, "request"))),
    cell("Circuit", word(worker.circuit), note(worker.circuit === "open" ? `tried in ${seconds(worker.circuit_wait_s)}` : "")),
    cell("Knowledge", word(worker.knowledge),
      reason(worker.drift || (worker.knowledge === "exact" ? "" : worker.reason), worker.drift ? "warn" : "")),
    cell("Blocks held", count(held(worker)), bar(TIERS.map((tier) => worker.blocks[tier] ?? 0), fullest), h("span", { class: "sub whole" }, tiers(worker))),
    cell("Cached, foretold → found", foresight(worker)));
}

const cell = (name, ...children) => h("td", { data: { name } }, children);
const word = (text) => h("span", { class: "word", data: { tone: TONES[text] ?? "none" } }, text);
const note = (text, tone = "") => (text ? h("span", { class: `sub ${tone}`.trim() }, text) : null);
const reason = (text, tone = "") => (text ? h("span", { class: `sub clamp ${tone}`.trim(), title: text }, text) : null);

export function bar(parts, most) {
  return h("span", { class: "bar", "aria-hidden": "true" }, parts.map((part) =>
    h("i", { vars: { width: `${((part / most) * 100).toFixed(2)}%` } })));
}

function tiers({ blocks, block_size: size, gaps }) {
  const lower = TIERS.slice(1).filter((tier) => blocks[tier]).map((tier) => `${count(blocks[tier])} ${tier}`);
  return [size ? `of ${size} tokens` : "", ...lower, gaps ? many(gaps, "gap") : ""].filter(Boolean).join(" · ");
}

function foresight(worker) {
  if (worker.role === "decode") return h("span", { class: "sub" }, "chosen by load");
  if (!worker.predicted_tokens && !worker.actual_tokens) return h("span", { class: "sub" }, "nothing compared yet");
  const wrong = worker.error_share;
  return [`${count(worker.predicted_tokens)} → ${count(worker.actual_tokens)}`,
    note(wrong > 0.005 ? `${share(wrong)} wrong lately` : "as foretold", wrong > 0.2 ? "warn" : "")];
}
