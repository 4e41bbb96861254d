// Findings: what is wrong, as GET /diagnosis says it; each finding leads to its rooms.

import { byId, fill, h, many } from "./dom.js";
import { ask } from "./net.js";

const EVERY_MS = 2000;
const SOON_MS = 300;

export function watchFindings() {
  const look = async () => {
    const connected = byId("main").dataset.fresh === "yes"; // before, nobody says that we may look
    if (connected && !document.hidden) {
      try {
        show(await ask("diagnosis"));
      } catch (error) {
        fill(byId("findings-note"));
        fill(byId("findings-body"), h("p", { class: "fault" }, `The diagnosis could not be had: ${error.message}`));
      }
    }
    setTimeout(look, connected ? EVERY_MS : SOON_MS);
  };
  look();
}

function show({ findings, blocked }) {
  const note = findings.length ? many(findings.length, "finding") : "";
  fill(byId("findings-note"), blocked ? `${note}, and requests fail by it` : note);
  if (!findings.length) {
    fill(byId("findings-body"), h("p", { class: "well" }, "Nothing is wrong."));
    return;
  }
  fill(byId("findings-body"), h("ul", { class: "findings", tabindex: "0", "aria-label": "Findings, worst first" },
    findings.map(finding)));
}

function finding(found) {
  const rooms = found.rooms ?? [];
  return h("li", { data: { blocks: found.blocks ? "yes" : "no", about: found.about, stage: found.stage } },
    h("b", {}, found.sentence),
    h("p", {}, [found.blocks ? "Requests fail by it" : "Served, but worse", `at ${found.stage}`, `culprit ${found.culprit}`,
      found.count > 1 ? `seen ${many(found.count, "time")}` : ""].filter(Boolean).join(" · ")),
    h("p", { class: "next" }, `Next: ${found.next_step}`),
    rooms.length ? h("p", {}, "Rooms ", rooms.map((room, at) => [at ? " · " : "",
      h("a", { href: `#room-${room}`, "aria-label": `Room ${room}` }, `…${room.slice(-6)}`)])) : null);
}
