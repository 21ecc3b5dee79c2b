// Formatting of numbers and names.
"use strict";

const INK = "#1b1b1b", GRID = "#e3e3e3";
const NARROW = 700;  // window width in pixels below which there is one column

const floats = text => new Float32Array(Uint8Array.from(atob(text), letter => letter.charCodeAt(0)).buffer);
// escaped for plotly, which interprets tags
const plain = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const make = (tag, text = "") => Object.assign(document.createElement(tag), { textContent: text });
const digits = value => Math.abs(value) >= 999.5 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(3)}`;
const narrow = () => window.innerWidth <= NARROW;

function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 1000) return `${digits(bytes)} ${unit}`;
    bytes /= 1000;
  }
  return `${digits(bytes)} TB`;
}

// ticks of a logarithmic axis: powers of ten, or closer ones for a short axis
function ticks(low, high) {
  const parts = high < 5 * low ? [1, 1.5, 2, 3, 4, 5, 7] : high < 200 * low ? [1, 2, 5] : [1], found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
    found.push(...parts.map(part => part * 10 ** power));
  }
  return found.filter(value => value >= low && value <= high);
}

// integer ticks of an axis of epochs
function whole(epochs) {
  const step = Math.max(1, epochs / 10), power = 10 ** Math.floor(Math.log10(step));
  return { tick0: 0, dtick: [1, 2, 5, 10].find(part => part * power >= step) * power };
}

// a name wrapped to lines of about this many characters
function lines(text, letters) {
  const found = [""];
  for (const word of text.split(" ")) {
    const longer = `${found[found.length - 1]} ${word}`.trim();
    if (longer.length > letters && found[found.length - 1]) found.push(word);
    else found[found.length - 1] = longer;
  }
  return plain(found.join("\n")).replace(/\n/g, "<br>");
}
