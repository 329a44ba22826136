// The samples of an iteration: groups with their completions side by side, and what changed since an earlier iteration.

import { at, button, make, number, signed } from "./dom.js";
import { diffWords } from "./diff.js";

const WAIT_MS = 20000;
const PAGE = 6;
const KEY = "tandem-key";
const SORTS = [
  ["worst", "least reward first"], ["best", "greatest reward first"], ["mixed", "most mixed first"],
  ["longest", "longest first"], ["shortest", "shortest first"], ["order", "in order"],
];
const USES = {
  trained: "its tokens count in the loss",
  dropped: "its group was left out: all of its rewards were equal",
  unscored: "it has no reward, because scoring it failed or no reward applies",
  masked: "cut off, so that it counts in no loss",
  evaluated: "of an evaluation",
};

let parameters = {};
let go = () => {};
// Answers of earlier questions are not drawn.
let asked = 0;
let newest = null;

// The key is in the address that the run prints; it stays in this tab, not in the address.
export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function ask(path, query) {
  const wanted = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch(`${path}?${new URLSearchParams(wanted)}`, {
    cache: "no-store",
    signal: AbortSignal.timeout(WAIT_MS),
    headers: key ? { Authorization: `Bearer ${key}` } : {},
  });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// Draw the view that the parameters of the address ask for. change: sets some of them.
export async function showSamples(given, change) {
  parameters = given;
  go = change;
  const { iteration, kind, sort, search, offset } = parameters;
  const mine = ++asked;
  at("problem").textContent = "";
  try {
    const found = await ask("samples.json", { iteration, kind, sort, search, offset, limit: PAGE });
    if (mine !== asked) return;
    newest = found.iterations[found.iterations.length - 1];
    showControls(found);
    showPager(found);
    at("groups").replaceChildren(...found.groups.map((group) => drawGroup(found, group)));
  } catch (error) {
    if (mine !== asked) return;
    at("problem").textContent = error.message;
    at("groups").replaceChildren();
  }
}

// Say that a newer iteration is stored, without taking the one that is being read away.
export function noteIteration(iteration) {
  const isNew = newest !== null && iteration > newest && parameters.view === "samples";
  at("newer").hidden = !isNew;
  if (isNew) at("newer").textContent = `iteration ${iteration} has finished`;
}

at("newer").addEventListener("click", () => go({ iteration: "", offset: "" }));

function select(choices, value, name) {
  const element = make("select");
  for (const [key, text] of choices) {
    const option = make("option", text);
    option.value = key;
    option.selected = key === value;
    element.append(option);
  }
  element.addEventListener("change", () => go({ [name]: element.value, offset: "" }));
  return element;
}

function entry(type, value, name, placeholder) {
  const element = make("input");
  element.type = type;
  element.value = value;
  element.placeholder = placeholder;
  element.addEventListener("change", () => go({ [name]: element.value, offset: "" }));
  return element;
}

function labelled(text, ...elements) {
  const label = make("label", text);
  label.append(...elements);
  return label;
}

function showControls(found) {
  const stored = found.iterations;
  const place = stored.indexOf(found.iteration);
  const step = (by) => button(by < 0 ? "‹" : "›", () => go({ iteration: String(stored[place + by]), offset: "" }),
    by < 0 ? "the stored iteration before" : "the stored iteration after");
  const [back, forth] = [step(-1), step(1)];
  back.disabled = place <= 0;
  forth.disabled = place < 0 || place === stored.length - 1;
  const iteration = entry("number", found.iteration, "iteration", "last");
  iteration.min = stored[0];
  iteration.max = stored[stored.length - 1];
  const compare = select([["", "nothing"], ["earlier", "the last time of the same row"], ["first", "its first time"]],
    parameters.compare || "", "compare");
  at("controls").replaceChildren(
    labelled("iteration ", back, iteration, forth),
    labelled("of ", select(found.all_kinds.map((kind) => [kind, kind]), found.kind, "kind")),
    labelled("sorted ", select(SORTS, parameters.sort || "worst", "sort")),
    labelled("with the text ", entry("search", parameters.search || "", "search", "regular expression")),
    labelled("compared with ", compare),
  );
}

function showPager(found) {
  const last = found.offset + found.groups.length;
  const text = found.num_groups === 0
    ? "no group fits" : `groups ${found.offset + 1} to ${last} of ${found.num_groups}`;
  const back = button("‹ previous", () => go({ offset: String(Math.max(0, found.offset - PAGE)) }));
  const forth = button("next ›", () => go({ offset: String(last) }));
  back.disabled = found.offset === 0;
  forth.disabled = last >= found.num_groups;
  at("pager").replaceChildren(back, make("span", text), forth);
}

function drawGroup(found, group) {
  const section = make("section", undefined, "group");
  const head = make("header");
  head.append(
    make("h2", group.group_id),
    make("span", `reward ${number(group.reward_mean)} on average`),
  );
  const source = make("span", `row ${group.row} of ${fileName(group.source) || group.kind}`, "dim");
  source.title = group.source;
  head.append(source);
  for (const [name, text] of Object.entries(group.columns)) head.append(make("span", `${name}: ${text}`, "dim"));
  const cards = make("div", undefined, "cards");
  cards.append(...group.samples.map((sample) => drawCard(found, group, sample, null)));
  const texts = make("div", undefined, "texts");
  texts.append(textBlock("prompt, not trained", group.prompt), textBlock("answer", group.answer));
  section.append(head, texts, cards);
  if (group.num_samples > group.samples.length) {
    section.append(make("p", `${group.num_samples - group.samples.length} more completions are not shown`, "dim"));
  }
  if (parameters.compare) compare(found, group, head, cards);
  return section;
}

const fileName = (path) => path.split("/").pop();

function textBlock(title, text) {
  const block = make("div", undefined, "block");
  block.append(make("h3", title), make("pre", text));
  return block;
}

const textOf = (sample) => sample.segments
  .map((segment) => segment.text ?? ` [... ${segment.left_out} characters ...] `).join("");

// Pairs are by rank in the group: sampled completions have no partner of their own.
async function compare(found, group, head, cards) {
  const note = make("span", "looking for an earlier time", "dim");
  head.append(note);
  const query = { kind: group.kind, source: group.source, row: group.row, before: found.iteration, sort: parameters.sort };
  try {
    const before = await ask("earlier.json", { ...query, order: parameters.compare });
    if (before.group === null) {
      note.textContent = "this row was not in an earlier stored iteration";
      return;
    }
    note.textContent = `compared with iteration ${before.iteration}, reward ${number(before.group.reward_mean)}`;
    cards.replaceChildren(...group.samples.map((sample, rank) => (
      drawCard(found, group, sample, before.group.samples[rank] || null)
    )));
  } catch (error) {
    note.textContent = error.message;
  }
}

function drawCard(found, group, sample, before) {
  const card = make("article", undefined, `card ${sample.use}`);
  const figures = make("p", undefined, "figures");
  const use = make("span", sample.use, "use");
  use.title = USES[sample.use] || "";
  const versions = new Set(sample.segments.filter((segment) => segment.text !== undefined).map((one) => one.version));
  const was = before === null ? "" : `${number(before.reward)} → `;
  figures.append(
    make("b", `${was}${number(sample.reward)}`),
    make("span", sample.advantage === null ? "" : `advantage ${signed(sample.advantage)}`),
    make("span", `${sample.num_tokens} tokens`),
    make("span", sample.finish_reason === "length" ? "cut off" : sample.finish_reason, sample.finish_reason),
    make("span", `version ${[...versions].join(", ")}`),
    use,
  );
  card.append(make("h3", `#${sample.sample}`), figures);
  const parts = Object.entries(sample.reward_parts);
  const score = ([name, value]) => `${name} ${Object.hasOwn(sample.errors, name) ? "failed" : number(value)}`;
  const sum = parts.reduce((total, [, value]) => total + (value || 0), 0);
  const weighted = sample.reward !== null && Math.abs(sum - sample.reward) > 1e-6 * Math.max(1, Math.abs(sample.reward));
  if (parts.length) card.append(make("p", (weighted ? "unweighted: " : "") + parts.map(score).join(" · "), "parts"));
  for (const [name, why] of Object.entries(sample.errors)) card.append(make("p", `${name} failed: ${why}`, "parts failed"));
  if (sample.turns) {
    const { rewards, contexts, end, error } = sample.turns;
    const got = rewards.map((reward, place) => `turn ${place + 1} ${reward === null ? "-" : number(reward)}`);
    const branches = contexts > 1 ? `${contexts} contexts` : "";
    card.append(make("p", [...got, branches, `ended: ${end}`, error].filter(Boolean).join(" · "), error ? "parts failed" : "parts"));
  }
  card.append(before === null ? completion(sample, versions) : difference(before, sample));
  if (sample.segments.some((segment) => segment.left_out)) card.append(whole(found, group, sample, card));
  return card;
}

function completion(sample, versions) {
  const text = make("pre");
  const order = [...versions];
  for (const segment of sample.segments) {
    if (segment.text === undefined) {
      text.append(make("span", ` [... ${segment.left_out} characters ...] `, "gap"));
    } else {
      const shade = versions.size > 1 ? `version v${order.indexOf(segment.version) % 4}` : "";
      const span = make("span", segment.text, segment.masked ? `unsampled ${shade}` : shade);
      if (versions.size > 1) span.title = `policy version ${segment.version}`;
      if (segment.masked) span.title = "not sampled by the policy: read, and in no loss";
      text.append(span);
    }
  }
  return text;
}

function difference(before, sample) {
  const text = make("pre");
  const tags = { same: "span", added: "ins", removed: "del" };
  text.append(...diffWords(textOf(before), textOf(sample)).map((run) => make(tags[run.kind], run.text)));
  return text;
}

function whole(found, group, sample, card) {
  return button("whole text", async () => {
    const query = { iteration: found.iteration, kind: found.kind, group: group.group_id, sample: sample.sample };
    try {
      const answer = await ask("samples.json", query);
      card.replaceWith(drawCard(found, group, answer.groups[0].samples[0], null));
    } catch (error) {
      at("problem").textContent = error.message;
    }
  });
}
