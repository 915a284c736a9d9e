// Common parts of the charts: elements, colours, numbers, details of a click, the library.
"use strict";
const root = document.documentElement, data = JSON.parse(document.getElementById("data").textContent);
const FAINT = 1e-3;            // a part of the allowance below which all look alike
const kept = new Map();        // colours of the present theme, and the tile of the hatching
const once = (name, make) => { if (!kept.has(name)) kept.set(name, make()); return kept.get(name); };
const color = (name) => once(name, () => getComputedStyle(root).getPropertyValue(`--${name}`).trim());
const hatch = () => once("tile", () => {
  const tile = el("canvas", { width: 8, height: 8 }), pen = tile.getContext("2d");
  pen.strokeStyle = color("hatch"); pen.lineWidth = 1.6;
  for (const shift of [-8, 0, 8]) { pen.beginPath(); pen.moveTo(shift, 8); pen.lineTo(shift + 8, 0); pen.stroke(); }
  return { image: tile, repeat: "repeat" };
});
const number = (value) => (typeof value === "string" ? value : value === 0 ? "0" : Math.abs(value) >= 0.001 && Math.abs(value) < 1e5 ? String(+value.toPrecision(4)) : value.toExponential(2));

/** An element; text is only ever set as text, so nothing of a result becomes markup. */
function el(tag, attributes = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value); else made.setAttribute(name, value);
  }
  made.append(...inside.filter((each) => each !== null && each !== undefined));
  return made;
}
function copied(text) {
  const button = el("button", { type: "button", click: async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "copied"; } catch { getSelection().selectAllChildren(button.nextSibling); }
  } }, "copy");
  return el("div", {}, button, el("pre", {}, text));
}
function swatch(name, text, extra = "") {
  return el("span", {}, el("i", { class: `swatch ${extra}`, ...(name && { style: `background:var(--${name})` }) }), text);
}
const ramp = () => el("span", {}, `part of the allowance used: ${FAINT} or less`, el("i", { class: "swatch ramp" }), "1");
const levels = () => ({ show: false, seriesIndex: 0, dimension: 3, min: Math.log10(FAINT), max: 0, inRange: { color: [0, 1, 2, 3, 4].map((step) => color(`use-${step}`)) } });
const levelOf = (used) => Math.min(Math.max(Math.log10(Math.max(used, FAINT)), Math.log10(FAINT)), 0);
const lineStyle = () => ({ color: color("line") });
const tip = (formatter) => ({ confine: true, backgroundColor: color("card"), borderColor: color("line"), textStyle: { color: color("ink"), fontSize: 13 }, formatter, transitionDuration: 0 });
/** The lines of what the pointer is on; the first one is its name. */
function hint(lines) {
  const made = el("div", { style: "max-width:460px;white-space:normal" });
  lines.forEach((text, index) => made.append(el("div", index ? {} : { style: "font-weight:600" }, text)));
  return made;
}
const library = (async () => {
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (char) => char.charCodeAt(0));
  const text = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(el("script", {}, text));
})();
/** Draws a part of the page in its section; where that fails, the section says so. */
async function drawn(id, draw) {
  const section = document.getElementById(id);
  try { await library; section.hidden = false; draw(section); } catch (error) {
    root.dataset.failed = String(error);
    section.replaceChildren(el("p", { class: "quiet" }, `The charts cannot be drawn here: ${error}`));
    section.hidden = false;
  }
}
const themed = (redraw) => matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { kept.clear(); redraw(); });
