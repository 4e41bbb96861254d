// Requests: the newest attempts, newest first; each leads to its room.

import { byId, clock, fill, h, many, seconds } from "./dom.js";

const TONES = { ok: "ok", open: "none", failed: "bad", rejected: "warn", client_gone: "warn" };
const WORDS = { client_gone: "client left", open: "under way" };

export function requests({ requests: listed, totals }) {
  const place = byId("requests-body");
  fill(byId("requests-note"), totals.retries ? many(totals.retries, "retry", "retries") : "");
  if (!listed.length) {
    fill(place, h("p", { class: "empty" }, "No request yet. Send one to ", h("code", {}, "/v1/chat/completions"), "."));
    return;
  }
  fill(place, h("div", { class: "flow-box", tabindex: "0", role: "region", "aria-label": "Newest requests" },
    h("table", { class: "flow" },
      h("caption", { class: "aside" }, "Newest requests, newest first"),
      h("thead", {}, h("tr", {}, ["When", "How it went", "Held", "Took"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, listed.map(row)))));
}

function row(request) {
  const { prefill, decode } = request;
  const pair = prefill ? `${prefill} → ${decode}` : decode;
  const room = request.rooms[0];
  const how = h("span", { class: "word", data: { tone: TONES[request.outcome] ?? "none" } }, WORDS[request.outcome] ?? request.outcome);
  return h("tr", { data: { outcome: request.outcome } },
    h("td", {}, room ? h("a", { href: `#room-${room}`, "aria-label": `Room of the request of ${clock(request.at)}` }, clock(request.at))
      : clock(request.at), h("span", { class: "sub whole" }, request.attempt > 1 ? `attempt ${request.attempt}` : "")),
    h("td", {}, how, h("span", { class: "sub" }, pair),
      request.stage || request.code ? h("span", { class: "sub bad" }, request.stage ?? request.code) : null),
    h("td", { class: "whole" }, depth(request)),
    h("td", { class: "whole" }, seconds(request.duration_s), request.first_byte_s !== null
      ? h("span", { class: "sub" }, `first ${seconds(request.first_byte_s)}`) : null));
}

function depth({ held_blocks: held, asked_blocks: asked }) {
  if (!asked) return h("span", { class: "sub" }, "–");
  return [h("span", { class: "depth", "aria-hidden": "true" }, h("i", { vars: { width: `${((held / asked) * 100).toFixed(1)}%` } })),
    `${held}/${asked}`];
}
