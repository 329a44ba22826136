// The words that differ between two texts.

// Words compared at most, of each text, between what they have in common at both ends: the table grows with the square.
const MOST = 1500;

const split = (text) => text.match(/\s+|\S+/g) || [];

// Returns runs of words: {kind: "same", "removed" or "added", text}.
export function diffWords(before, after) {
  const [old, now] = [split(before), split(after)];
  let head = 0;
  while (head < Math.min(old.length, now.length) && old[head] === now[head]) head += 1;
  let tail = 0;
  while (tail < Math.min(old.length, now.length) - head && old[old.length - 1 - tail] === now[now.length - 1 - tail]) {
    tail += 1;
  }
  const middle = compare(old.slice(head, old.length - tail), now.slice(head, now.length - tail));
  return joined([
    ...now.slice(0, head).map((text) => ({ kind: "same", text })),
    ...middle,
    ...now.slice(now.length - tail).map((text) => ({ kind: "same", text })),
  ]);
}

function compare(old, now) {
  if (old.length > MOST || now.length > MOST) {
    return [{ kind: "removed", text: old.join("") }, { kind: "added", text: now.join("") }].filter((run) => run.text);
  }
  const width = now.length + 1;
  // Words in common of old[i:] and now[j:].
  const common = new Uint16Array((old.length + 1) * width);
  for (let i = old.length - 1; i >= 0; i -= 1) {
    for (let j = now.length - 1; j >= 0; j -= 1) {
      common[i * width + j] = old[i] === now[j]
        ? common[(i + 1) * width + j + 1] + 1
        : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  const found = [];
  let [i, j] = [0, 0];
  while (i < old.length || j < now.length) {
    if (i < old.length && j < now.length && old[i] === now[j]) {
      found.push({ kind: "same", text: now[j] });
      [i, j] = [i + 1, j + 1];
    } else if (j >= now.length || (i < old.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) {
      found.push({ kind: "removed", text: old[i] });
      i += 1;
    } else {
      found.push({ kind: "added", text: now[j] });
      j += 1;
    }
  }
  return found;
}

function joined(words) {
  const runs = [];
  for (const word of words) {
    const last = runs[runs.length - 1];
    if (last && last.kind === word.kind) last.text += word.text;
    else runs.push({ ...word });
  }
  return runs;
}
