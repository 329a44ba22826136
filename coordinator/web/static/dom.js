// Elements and numbers. Every text is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);

export function make(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

export function draw(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  if (text !== undefined) element.textContent = text;
  return element;
}

export function button(text, onClick, title) {
  const element = make("button", text);
  element.type = "button";
  if (title) element.title = title;
  element.addEventListener("click", onClick);
  return element;
}

const isMissing = (value) => value === null || value === undefined;

// Three significant digits, without an exponent where that is short.
export function number(value) {
  if (isMissing(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
  if (size >= 100) return value.toFixed(0);
  return value.toFixed(size >= 10 ? 1 : 3);
}

export function signed(value) {
  return isMissing(value) ? "–" : `${value > 0 ? "+" : ""}${number(value)}`;
}

export function seconds(value) {
  if (isMissing(value)) return "–";
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
