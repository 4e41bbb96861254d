// Figures: the row of numbers at the top, each with the last two minutes behind it.

import { byId, count, fill, h, many, seconds, share, sum } from "./dom.js";

const KEPT_S = 120;
const LEAST_S = 15; // of a line, however short the page was open
const RATE_S = 10; // a rate is taken over this long
const SVG = "http://www.w3.org/2000/svg";
const history = []; // pictures' numbers, oldest first

export function figures(picture) {
  remember(picture);
  const now = history.at(-1);
  const { recent, totals } = picture;
  const lagging = picture.store_down_s > 1;
  fill(byId("figures"), [
    figure("Requests per second", now.rate === null ? "–" : now.rate.toFixed(1), "", "rate"),
    figure("In flight", count(picture.rooms_open),
      [many(now.tokens, "token"), picture.queued ? `${count(picture.queued)} waiting` : ""].filter(Boolean).join(", "), "tokens"),
    figure("Hit share", share(recent.hit_share),
      recent.compared ? `of ${count(recent.prompt_tokens)} tokens` : "nothing compared yet", "hit"),
    figure("First byte", seconds(recent.first_byte_p50_s),
      recent.first_byte_p95_s === null ? "" : `p95 ${seconds(recent.first_byte_p95_s)}`, "first"),
    figure("Index lag", lagging ? seconds(picture.store_down_s) : seconds(picture.lag_ms / 1000),
      lagging ? "store away" : "", "lag", lagging),
    figure("Failed", count(totals.failed), `of ${many(sum([totals.ok, totals.refused, totals.failed, totals.gone]), "request")}`,
      "failed", now.failing > 0),
  ]);
}

function remember(picture) {
  const { totals, recent } = picture;
  const done = sum([totals.ok, totals.refused, totals.failed, totals.gone]);
  const entry = {
    at: picture.at, done, lost: totals.failed,
    tokens: sum(picture.workers.map((worker) => worker.inflight_tokens ?? 0)),
    hit: recent.hit_share, first: recent.first_byte_p50_s, lag: picture.lag_ms / 1000,
  };
  if (history.length && done < history.at(-1).done) history.length = 0; // another life of the gateway
  const before = history.find((one) => one.at >= picture.at - RATE_S) ?? null;
  const apart = before ? picture.at - before.at : 0;
  entry.rate = apart >= 0.9 ? (done - before.done) / apart : null;
  entry.failing = apart >= 0.4 ? totals.failed - before.lost : 0;
  entry.failed = apart >= 0.9 ? (totals.failed - before.lost) / apart : null;
  history.push(entry);
  while (history[0].at < picture.at - KEPT_S) history.shift();
}

function figure(name, value, more, line, bad = false) {
  return h("dl", { class: bad ? "figure bad" : "figure", vars: { margin: 0 } },
    h("dt", {}, name),
    h("dd", {}, value, more ? h("small", {}, more) : ""),
    spark(line));
}

function spark(name) {
  const drawn = document.createElementNS(SVG, "svg");
  drawn.setAttribute("viewBox", "0 0 120 30");
  drawn.setAttribute("preserveAspectRatio", "none");
  drawn.setAttribute("aria-hidden", "true");
  const points = history.filter((one) => one[name] !== null && one[name] !== undefined);
  if (points.length < 2) return drawn;
  const most = Math.max(...points.map((one) => one[name]), name === "hit" ? 1 : 1e-6);
  const end = history.at(-1).at;
  const wide = Math.min(KEPT_S, Math.max(LEAST_S, end - history[0].at));
  const at = (one) => `${(120 - ((end - one.at) / wide) * 120).toFixed(1)},${(28 - (one[name] / most) * 24).toFixed(1)}`;
  const path = thin(points).map(at);
  const first = path[0].split(",")[0];
  drawn.append(
    shape("path", { class: "spark-area", d: `M${first},30 L${path.join(" L")} L120,30 Z` }),
    shape("path", { class: "spark-line", d: `M${path.join(" L")}` }));
  return drawn;
}

const thin = (points) => points.filter((_, at) => at % 2 === 0 || at === points.length - 1);

function shape(tag, facts) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(facts)) made.setAttribute(name, value);
  return made;
}
