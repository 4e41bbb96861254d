// Room: one meeting of a prefill and a decode: who, why, and every stage on one scale of time.

import { byId, clock, count, fill, h, many, seconds } from "./dom.js";
import { ask } from "./net.js";

const AGAIN_MS = 1000; // while it is under way
const UNSEEN = "not observed";
const HOW = { failed: "failed", open: "open", [UNSEEN]: "unseen", "client gone": "left" }; // ok: went
const WORDS = { failed: "failed", open: "under way", left: "ended: the client left" };
const LANES = { gateway: "Gateway", prefill: "Prefill", decode: "Decode" };

let shown = "";
let timer = 0;

export function watchRooms() {
  const sheet = byId("room");
  const follow = () => {
    const room = /^#room-(\d+)$/.exec(location.hash)?.[1];
    if (room) open(room);
    else if (sheet.open) sheet.close();
  };
  byId("room-close").addEventListener("click", () => sheet.close());
  sheet.addEventListener("click", (event) => event.target === sheet && sheet.close());
  sheet.addEventListener("close", () => {
    clearTimeout(timer);
    shown = "";
    if (location.hash) history.replaceState(null, "", location.pathname + location.search);
  });
  window.addEventListener("hashchange", follow);
  follow();
}

function open(room) {
  shown = room;
  fill(byId("room-name"), "Room ", h("code", {}, room));
  fill(byId("room-body"), h("p", { class: "empty" }, "Asking what happened there …"));
  if (!byId("room").open) byId("room").showModal();
  byId("room-name").focus();
  look(room);
}

async function look(room) {
  clearTimeout(timer);
  try {
    const found = await ask(`rooms/${room}`);
    if (shown !== room) return;
    show(found);
    if (found.outcome === "open" || !found.collected) timer = setTimeout(() => look(room), AGAIN_MS);
  } catch (error) {
    if (shown === room) fill(byId("room-body"), h("p", { class: "fault" }, error.message));
  }
}

function show(found) {
  fill(byId("room-body"), headline(found),
    h("dl", { class: "facts-list" }, facts(found).map(([name, value]) => h("div", { class: value.length > 22 ? "long" : "" }, h("dt", {}, name), h("dd", {}, value)))),
    found.stages.length ? h("div", { class: "scroll" }, waterfall(found)) : h("p", { class: "empty" }, "No stage was seen."));
}

// Where it stopped first: of the stages that failed the earliest, and the engines' before ours.
function headline(found) {
  const broken = found.stages.filter((stage) => stage.outcome === "failed");
  const first = broken.find((stage) => stage.by !== "gateway") ?? broken[0];
  if (found.outcome !== "failed" || !(first || found.error)) return null;
  return h("div", { class: "fault" }, first ? h("b", {}, `Stopped at ${first.stage}. `) : null,
    first?.detail || (found.error?.message ?? "No reason was given."));
}

function facts(found) {
  const { why = {}, cached_tokens: cached = {} } = found;
  return [
    ["Outcome", { client_gone: "client left", open: "under way" }[found.outcome] ?? found.outcome],
    ["When", clock(found.opened_at)],
    ["Took", `${seconds(found.duration_s)}${found.first_byte_s === null ? "" : `, first byte ${seconds(found.first_byte_s)}`}`],
    ["Prefill", found.prefill?.worker ?? "none: one worker did both"],
    ["Decode", found.decode?.worker ?? "–"],
    ["Held when chosen", why.asked_blocks ? `${why.depth_blocks} of ${many(why.asked_blocks, "block")}` : "–"],
    ["Cached, foretold → found", `${count(cached.predicted)} → ${count(cached.actual)} tokens`],
    ["Policies", [why.prefill_policy, why.decode_policy].filter(Boolean).join(", then ") || "–"],
    ["Knowledge", `${why.knowledge ?? "–"}${why.reason ? `: ${why.reason}` : ""}`],
    ["Not tried again", found.stopped ?? ""],
    ["Trace", found.traceparent ?? ""],
    ["Request", `${found.request_id}${found.attempt > 1 ? `, attempt ${found.attempt}` : ""}`],
  ].filter(([, value]) => value);
}

// Where a stage belongs: with its witness ("prefill@10.0.0.7:30000"); one that nobody told of, with
// who would have.
function laneOf(stage, found) {
  if (stage.outcome === UNSEEN) return stage.stage === "register" ? "prefill" : "decode";
  const by = String(stage.by || "gateway");
  if (by.split("@")[0] in LANES) return by.split("@")[0];
  const side = ["prefill", "decode"].find((one) =>
    [found[one]?.worker, found[one]?.url?.replace(/^https?:\/\//, "")].some((name) => name && by.startsWith(name)));
  return side ?? by;
}

function waterfall(found) {
  const timed = found.stages.map((stage) => ({ ...stage, ...span(stage, found) }));
  const whole = Math.max(found.duration_s ?? 0, ...timed.map((stage) => stage.to), 1e-4);
  const lanes = new Map(Object.keys(LANES).map((name) => [name, []]));
  for (const stage of timed) {
    const lane = laneOf(stage, found);
    lanes.set(lane, [...(lanes.get(lane) ?? []), stage]);
  }
  return h("table", { class: "waterfall" },
    h("caption", { class: "aside" }, "Stages of the room on one scale of time"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Stage"), h("th", { scope: "col", class: "scale" }, ticks(whole)),
      h("th", { scope: "col", class: "num" }, "Took"))),
    [...lanes].filter(([lane, stages]) => stages.length || found.legs?.[lane]).map(([lane, stages]) =>
      h("tbody", { data: { lane } }, heading(lane, found), stages.map((stage) => row(stage, whole)))));
}

// From and to, in seconds since the attempt began; what began before it is cut off there.
function span(stage, found) {
  const took = stage.duration_s ?? 0;
  if (stage.at) {
    const to = Math.max(0, stage.at - found.opened_at);
    return { from: Math.max(0, to - took), to };
  }
  const from = stage.begin_s ?? 0;
  return { from, to: from + took };
}

function ticks(whole) {
  return h("span", { class: "ticks" }, [0, 0.25, 0.5, 0.75, 1].map((part) => h("span", {}, part ? seconds(whole * part) : "0")));
}

function heading(lane, found) {
  const leg = found.legs?.[lane];
  const answered = leg && (leg.error ?? (leg.status ? `answered ${leg.status}, ${count(leg.bytes)} bytes${leg.complete ? "" : ", cut off"}` : "no answer"));
  const told = [found[lane]?.worker, answered].filter(Boolean).join(" · ");
  return h("tr", { class: "lane" }, h("th", { colspan: 3, scope: "rowgroup" }, LANES[lane] ?? lane, told ? h("span", {}, told) : ""));
}

function row(stage, whole) {
  const place = { "--from": `${((stage.from / whole) * 100).toFixed(2)}%`, "--wide": `${(((stage.to - stage.from) / whole) * 100).toFixed(2)}%` };
  const how = HOW[stage.outcome] ?? "went";
  return h("tr", { class: how, data: { stage: stage.stage, outcome: stage.outcome } },
    h("th", { scope: "row" }, WORDS[how] ? `${stage.stage} ${WORDS[how]}` : stage.stage,
      stage.detail ? h("span", { class: "why" }, stage.detail) : null),
    h("td", { class: "scale" }, h("div", { class: "stage" }, h("i", { vars: place }))),
    h("td", { class: "num" }, how === "unseen" ? "not observed" : seconds(stage.duration_s)));
}
