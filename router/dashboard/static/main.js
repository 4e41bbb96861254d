// Main: who is told what. The live stream draws figures, fleet and requests; the rest asks itself.

import { byId, fill, h, seconds } from "./dom.js";
import { figures } from "./figures.js";
import { watchFindings } from "./findings.js";
import { fleet } from "./fleet.js";
import { follow, theKey } from "./net.js";
import { served, watchPrompt } from "./prompt.js";
import { requests } from "./requests.js";
import { watchRooms } from "./room.js";

const THEMES = ["auto", "light", "dark"];
let last = 0; // when the last picture came, by this machine's clock

function drawn(picture) {
  last = Date.now();
  byId("main").dataset.fresh = "yes";
  byId("main").hidden = false;
  byId("away").hidden = true;
  byId("key").hidden = true;
  linked("live", "live");
  state(picture);
  figures(picture);
  fleet(picture);
  requests(picture);
  served(picture.models);
}

function state({ state: now, workers, models }) {
  const roles = ["prefill", "decode", "both"].map((role) => [role, workers.filter((one) => one.role === role && one.state === "serving").length]);
  const there = roles.filter(([, number]) => number).map(([role, number]) => `${number} ${role}`).join(", ");
  const about = [there, models.join(", ")].filter(Boolean).join(" · ");
  const reason = now.reason.split(":")[0]; // who it is and why, the diagnosis says
  fill(byId("state"), now.ready ? h("b", {}, reason ? `Serving, but ${reason}` : "Serving") : h("b", { class: "bad" }, `Cannot serve: ${reason}`), about ? ` · ${about}` : "");
  document.title = now.ready ? "kvplane" : "kvplane: cannot serve";
}

function linked(how, text) {
  byId("link").dataset.link = how;
  fill(byId("link"), text);
}

function away(error, wait) {
  byId("main").dataset.fresh = "no";
  linked("down", "not connected");
  const since = last ? `What you see is ${seconds((Date.now() - last) / 1000)} old.` : "Nothing was heard yet.";
  fill(byId("away-text"), `Not connected to the gateway (${error.message}). ${since} Trying again in ${seconds(wait / 1000)}.`);
  byId("away").hidden = false;
}

function locked(error) {
  byId("main").dataset.fresh = "no";
  byId("main").hidden = true;
  linked("down", "locked");
  fill(byId("state"), "Locked");
  byId("away").hidden = true;
  byId("key").hidden = false;
  fill(byId("key-why"), error.message);
  if (error.status === 401 || !theKey.get()) byId("key-text").focus();
}

function themes() {
  const kept = localStorage.getItem("kvplane-theme");
  const use = (theme) => {
    document.documentElement.dataset.theme = theme;
    fill(byId("theme"), `Theme: ${theme}`);
    localStorage.setItem("kvplane-theme", theme);
  };
  use(THEMES.includes(kept) ? kept : "auto");
  byId("theme").addEventListener("click", () =>
    use(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));
}

themes();
watchPrompt();
watchRooms();
watchFindings();
const stream = follow("dashboard/live", {
  opening: () => linked(byId("link").dataset.link === "down" ? "down" : "opening", "connecting"),
  picture: drawn,
  away,
  locked,
});
byId("again").addEventListener("click", () => stream.again());
window.addEventListener("online", () => stream.again());
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  theKey.set(byId("key-text").value.trim());
  byId("key-text").value = "";
  stream.again();
});
