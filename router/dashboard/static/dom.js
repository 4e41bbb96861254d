// Dom: making and changing elements, and how numbers look. No state, no network.

export const byId = (id) => document.getElementById(id);

// h("td", {class: "num", data: {name: "Load"}, title: "…"}, "text", child)
export function h(tag, facts = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(facts)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "data") for (const [key, to] of Object.entries(value)) made.dataset[key] = to ?? "";
    else if (name === "vars") for (const [key, to] of Object.entries(value)) made.style.setProperty(key, to);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

// Put these children there, but only where something differs: focus and selection stay.
export function fill(place, ...children) {
  const next = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== "");
  const fresh = h("div", {}, next);
  if (place.innerHTML === fresh.innerHTML) return;
  const bare = (one) => one.children.length === one.childNodes.length; // elements alone, no text
  if (bare(place) && bare(fresh) && place.children.length === fresh.children.length) {
    const olds = [...place.children], news = [...fresh.children];
    olds.forEach((old, at) => {
      if (old.outerHTML !== news[at].outerHTML) patch(old, news[at]);
    });
    return;
  }
  place.replaceChildren(...fresh.childNodes);
}

// Change one element into another, as deep as they are of one shape.
function patch(old, next) {
  const alike = old.tagName === next.tagName && old.childNodes.length === next.childNodes.length &&
    [...old.childNodes].every((node, at) => node.nodeName === next.childNodes[at].nodeName);
  if (!alike) return old.replaceWith(next);
  for (const { name } of [...old.attributes]) if (!next.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of next.attributes) {
    if (name === "style") old.style.cssText = next.style.cssText; // as an attribute the page's policy forbids it
    else if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const news = [...next.childNodes];
  [...old.childNodes].forEach((node, at) => {
    if (node.nodeType === Node.TEXT_NODE) {
      if (node.data !== news[at].data) node.data = news[at].data;
    } else patch(node, news[at]);
  });
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return Math.round(value).toLocaleString("en-US");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 ms";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.1) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${Math.round(value / 3600)} h`;
}

export const share = (value) => (value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`);
export const many = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export const sum = (numbers) => numbers.reduce((one, other) => one + other, 0);
