// The browser of completions: filters, a list that draws only what is in view, one completion colored by advantage.
const ITEM = 52, FOLD = 2400;
// The newest first; groups of a step, and rows of a group, in their own order.
const newest = (groups) => [...groups].sort((a, b) => b.step - a.step || a.index - b.index);
const entries = RUNS.flatMap((run, r) => newest(run.groups).flatMap((group) => group.rows.map((row, i) => ({ run, r, group, row, i }))));
let shownEntries = entries, selected = 0, asTree = true;
const fields = {};

const textOf = (row) => (row.joined ??= row.spans.map((span) => span.text).join(""));

function matches(entry) {
  const { run, verdict, mode, from, to, search } = fields;
  if (run && run.value !== "" && entry.r !== Number(run.value)) return false;
  if (verdict.value !== "" && String(entry.row.right) !== verdict.value) return false;
  if (mode && mode.value !== "" && entry.group.mode !== mode.value) return false;
  if (from.value !== "" && entry.group.step < Number(from.value)) return false;
  if (to.value !== "" && entry.group.step > Number(to.value)) return false;
  const wanted = search.value.toLowerCase();
  return !wanted || textOf(entry.row).toLowerCase().includes(wanted) || entry.group.prompt.toLowerCase().includes(wanted);
}

function refilter() {
  const before = shownEntries[selected];
  shownEntries = entries.filter(matches);
  $("shown-count").textContent = `${shownEntries.length} of ${entries.length} completions`;
  select(Math.max(0, shownEntries.indexOf(before)));
}

function drawList() {
  const list = $("list"), first = Math.max(0, Math.floor(list.scrollTop / ITEM) - 4);
  const last = Math.min(shownEntries.length, first + Math.ceil(list.clientHeight / ITEM) + 8);
  const items = [];
  for (let at = first; at < last; at += 1) {
    const { run, r, group, row, i } = shownEntries[at];
    const item = el("div", { class: "item", role: "option", id: "item-" + at, "aria-selected": String(at === selected), "aria-posinset": at + 1, "aria-setsize": shownEntries.length, onclick: () => select(at) },
      el("div", { class: "top" }, MANY ? el("span", { class: "dot r" + (r % 6), title: plain(run.name) }) : null,
        `step ${group.step} · ${group.mode === "train" ? "" : plain(group.mode) + " "}${group.index}.${i + 1}`, verdict(row), el("b", {}, row.advantage === null ? "" : signed(row.advantage))),
      el("div", { class: "text" }, el("bdi", {}, plain(textOf(row).slice(0, 120)).replace(/\s+/g, " "))));
    item.style.top = at * ITEM + "px";
    items.push(item);
  }
  const space = el("div", { role: "presentation" });
  space.style.height = shownEntries.length * ITEM + "px";
  list.replaceChildren(space, ...items);
  list.setAttribute("aria-activedescendant", "item-" + selected);
}

function select(at) {
  selected = Math.min(Math.max(at, 0), Math.max(shownEntries.length - 1, 0));
  const list = $("list"), top = selected * ITEM;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ITEM > list.scrollTop + list.clientHeight) list.scrollTop = top + ITEM - list.clientHeight;
  drawList();
  drawDetail(shownEntries[selected]);
}

// From one group to the next or the one before.
function selectGroup(direction) {
  const group = shownEntries[selected] && shownEntries[selected].group;
  let at = selected;
  while (shownEntries[at] && shownEntries[at].group === group) at += direction;
  if (shownEntries[at]) {
    const first = shownEntries.findIndex((entry) => entry.group === shownEntries[at].group);
    select(first);
  }
}

function folding(box, length, label) {
  if (length <= FOLD) return [box];
  box.classList.add("folded");
  const button = el("button", { type: "button", "aria-expanded": "false" }, `Show all of the ${label}`);
  button.addEventListener("click", () => {
    const open = !box.classList.toggle("folded");
    button.setAttribute("aria-expanded", String(open));
    button.textContent = (open ? "Fold the " : "Show all of the ") + label;
  });
  return [box, button];
}

function colored(spans, reach) {
  const nodes = [];
  let step = null;
  for (const span of spans) {
    if (span.step !== undefined && span.step !== step) {
      const score = span.step_reward === undefined ? "" : " · " + number(span.step_reward);
      nodes.push(el("span", { class: "stepmark", title: "step and its reward" }, `${span.step + 1}${score}`));
      step = span.step;
    }
    const side = span.masked ? "masked" : span.advantage > 0 ? "pos" : span.advantage < 0 ? "neg" : "";
    const title = span.masked ? "not trained on" : span.advantage === undefined ? "" : "advantage " + signed(span.advantage);
    nodes.push(el("span", { class: "tok " + side, title, "--a": Math.abs(span.advantage || 0) / reach }, ...visibleNodes(span.text)));
  }
  return nodes;
}

function highlight(box) {
  if (!window.Highlight || !CSS.highlights) return;
  const wanted = fields.search.value.toLowerCase(), ranges = [];
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); wanted && node && ranges.length < 500; node = walker.nextNode()) {
    const text = node.data.toLowerCase();
    for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
      if (at + wanted.length > node.data.length) break;
      const range = new Range();
      range.setStart(node, at);
      range.setEnd(node, at + wanted.length);
      ranges.push(range);
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

function drawDetail(entry) {
  const pane = $("detail");
  if (!entry) {
    pane.replaceChildren(el("p", { class: "hint" }, "No completion matches."));
    return;
  }
  const { run, r, group, i } = entry;
  const reach = Math.max(1e-9, ...group.rows.flatMap((other) => other.spans.map((span) => Math.abs(span.advantage || 0))));
  const choose = (other) => {
    const at = shownEntries.findIndex((found) => found.group === group && found.i === other);
    if (at >= 0) select(at);
    else drawDetail({ ...entry, row: group.rows[other], i: other }); // filtered out of the list, shown all the same
  };
  const scale = reach === 1e-9 ? null : el("span", { class: "scale" }, "token advantage", el("i", { class: "neg" }), "−" + number(reach), el("i", { class: "pos" }), "+" + number(reach));
  const held = pane.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const prompt = el("div", { class: "prompt", dir: "ltr" }, ...visibleNodes(group.prompt));
  pane.replaceChildren(
    el("h2", {}, MANY ? el("bdi", {}, el("span", { class: "dot r" + (r % 6) }), plain(run.name)) : null,
      `Step ${group.step}, group ${group.index}`, group.mode === "train" ? null : el("span", { class: "unit" }, plain(group.mode))),
    ...folding(prompt, group.prompt.length * 3, "prompt"),
    Object.keys(group.columns).length ? el("div", { class: "cols" }, Object.entries(group.columns).map(([name, value]) =>
      el("span", {}, plain(name) + " ", el("bdi", {}, plain(value))))) : "",
    group.tree ? viewSwitch(entry) : "",
    ...(group.tree && asTree ? treeParts(group, i, choose, reach, scale) : rowParts(group, i, choose, reach, scale)));
  if (held) pane.querySelector(`[data-key="${held}"]`)?.focus({ preventScroll: true });
  highlight(pane.querySelector(".tree, #completion-text"));
}

function viewSwitch(entry) {
  const button = (tree, label) => el("button", { type: "button", "data-key": "view-" + label, "aria-pressed": String(asTree === tree), onclick: () => { asTree = tree; drawDetail(entry); } }, label);
  return el("div", { class: "views", role: "group", "aria-label": "Show the group as" }, button(true, "Tree"), button(false, "Table"));
}

const leftOut = (cut) => (cut ? el("p", { class: "note" }, `${cut} characters of the middle are left out here; the run's files have them.`) : "");

function rowParts(group, i, choose, reach, scale) {
  const row = group.rows[i];
  const chips = [
    ...Object.entries(row.rewards).map(([name, value]) => [plain(name), number(value)]),
    ["advantage", row.advantage === null ? "–" : signed(row.advantage)],
    ["length", lengthOf(row) + (row.truncated ? ", truncated" : "")],
  ];
  const box = el("div", { class: "text-box", id: "completion-text", dir: "ltr" }, colored(row.spans, reach));
  return [
    groupView(group, i, choose),
    el("h2", { id: "completion-title" }, `Completion ${i + 1} of ${group.rows.length}`, verdict(row), scale),
    el("div", { class: "chips" }, chips.map(([name, value]) => chip(name, value))),
    leftOut(row.cut),
    ...folding(box, textOf(row).length, "completion"),
  ];
}

function treeParts(group, i, choose, reach, scale) {
  return [el("h2", {}, treeTitle(group), scale), leftOut(Math.max(...group.rows.map((row) => row.cut))), treeView(group, i, choose, reach)];
}

function filterBar() {
  const make = (name, element) => (fields[name] = element);
  const options = (pairs) => pairs.map(([value, label]) => el("option", { value }, label));
  const parts = [];
  if (MANY) parts.push(el("label", {}, "run ", make("run", el("select", {}, options([["", "all"], ...RUNS.map((run, i) => [i, plain(run.name)])])))));
  parts.push(el("label", {}, "verdict ", make("verdict", el("select", { id: "verdict" }, options([["", "all"], ["true", "correct"], ["false", "incorrect"]])))));
  const modes = [...new Set(entries.map((entry) => entry.group.mode))];
  if (modes.length > 1) parts.push(el("label", {}, "mode ", make("mode", el("select", {}, options([["", "all"], ...modes.map((mode) => [mode, plain(mode)])])))));
  parts.push(el("label", {}, "steps ", make("from", el("input", { type: "number", min: 0, "aria-label": "from step", placeholder: "from" })), " ",
    make("to", el("input", { type: "number", min: 0, "aria-label": "to step", placeholder: "to" }))));
  parts.push(make("search", el("input", { type: "search", id: "search", placeholder: "search text", "aria-label": "search in prompts and completions" })));
  parts.push(el("span", { class: "hint", id: "shown-count", role: "status" }));
  Object.values(fields).forEach((field) => field.addEventListener("input", refilter));
  return el("div", { class: "filters" }, parts);
}

function startCompletions() {
  if (!entries.length) {
    $("browser").append(el("p", { class: "hint" }, "No completions were recorded. With plain TRL, log_completions=True records them."));
    return;
  }
  const some = RUNS.filter((run) => run.rows_shown < run.rows_total || run.rows_shown).map((run) =>
    `${MANY ? plain(run.name) + ": " : ""}showing ${run.rows_shown} of ${run.rows_are_exact ? "" : "about "}${run.rows_total} recorded completions`);
  const whole = RUNS.every((run) => run.rows_shown === run.rows_total);
  const key = (name) => el("kbd", {}, name);
  $("browser").append(
    el("p", { class: "hint" }, some.join("; ") + (whole ? "." : ": the newest, some spread over the whole run, and the extremes.")),
    filterBar(),
    el("p", { class: "keys" }, key("j"), " ", key("k"), " next, previous · ", key("n"), " ", key("p"), " group · ", key("/"), " search · ", key("f"), " unfold · ", key("t"), " light or dark"),
    el("div", { class: "panes" },
      el("div", { class: "list", id: "list", role: "listbox", tabindex: 0, "aria-label": "Completions", onscroll: drawList }),
      el("div", { class: "detail", id: "detail" })));
  new ResizeObserver(drawList).observe($("list"));
  refilter();
}
