// Net: questions to the gateway, and its live stream, both with the key where one is needed.
// The stream is read with fetch and not with EventSource, which can carry no key.

const KEY = "kvplane-admin-key"; // kept by this tab alone, and gone with it
const SILENT_MS = 6000; // a picture comes twice a second
const FIRST_WAIT_MS = 400;
const MOST_WAIT_MS = 5000;

export const theKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers(more = {}) {
  const key = theKey.get();
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

async function refusal(answer) {
  const text = await answer.text();
  let message = text.slice(0, 300) || answer.statusText || `status ${answer.status}`;
  let code = "";
  try {
    const { error } = JSON.parse(text);
    message = error.message ?? message;
    code = error.code ?? "";
  } catch { /* not ours: the text says what there is to say */ }
  return new Refused(answer.status, message, code);
}

export async function ask(path, { body, signal } = {}) {
  const deadline = AbortSignal.timeout(15000);
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers: headers(body === undefined ? {} : { "content-type": "application/json" }),
    body: body === undefined ? undefined : JSON.stringify(body),
    signal: signal ? AbortSignal.any([signal, deadline]) : deadline,
    cache: "no-store",
  });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

// A browser has six connections to a host, and each stream keeps one: a tab nobody sees lets go.
const UNSEEN_MS = 5000;

function seen() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((done) => document.addEventListener("visibilitychange", () => document.hidden || done()));
}

// Follows `path` for ever. hears: {opening, picture(data), away(error, waitMs), locked(error)}.
// Returns {again}: try at once, for instance with another key.
export function follow(path, hears) {
  let wake = () => {};
  let told = false; // to try again, also while an attempt was still under way
  let wait = FIRST_WAIT_MS;
  const pause = (ms) => new Promise((done) => {
    wake = done;
    if (told) done();
    else if (ms !== Infinity) setTimeout(done, ms);
  });

  async function once() {
    const stop = new AbortController();
    let watch, leave;
    const hide = () => {
      clearTimeout(leave);
      if (document.hidden) leave = setTimeout(() => stop.abort(new Error("nobody looks")), UNSEEN_MS);
    };
    document.addEventListener("visibilitychange", hide);
    const alive = () => {
      clearTimeout(watch);
      watch = setTimeout(() => stop.abort(new Error("the gateway fell silent")), SILENT_MS);
    };
    try {
      alive();
      const answer = await fetch(path, { headers: headers(), signal: stop.signal, cache: "no-store" });
      if (!answer.ok) throw await refusal(answer);
      for await (const data of events(answer.body, alive)) {
        wait = FIRST_WAIT_MS;
        hears.picture(data);
      }
      throw new Error("the gateway ended the stream");
    } finally {
      document.removeEventListener("visibilitychange", hide);
      clearTimeout(leave);
      clearTimeout(watch);
      stop.abort();
    }
  }

  (async () => {
    for (;;) {
      await seen();
      told = false;
      hears.opening();
      try {
        await once();
      } catch (error) {
        if (error instanceof Refused && [401, 403].includes(error.status)) {
          hears.locked(error);
          await pause(Infinity);
          continue;
        }
        if (document.hidden) continue;
        hears.away(error, wait);
        await pause(wait);
        wait = Math.min(wait * 1.7, MOST_WAIT_MS);
      }
    }
  })();
  return { again: () => { wait = FIRST_WAIT_MS; told = true; wake(); } };
}

async function* events(body, alive) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data: "));
      if (lines.length) yield JSON.parse(lines.map((line) => line.slice(6)).join("\n"));
    }
  }
}
