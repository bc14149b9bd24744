// One group of answers under GRPO, DAPO (TRL's default) and Dr. GRPO: what does a token weigh, what does an answer pull?
// Self-contained, with group_widget.css beside it: mountGroupWidget(element, { rewards, lengths }).

// Per objective `advantages`, `weights` (of a token) and `pulls` (of an answer: weight times length). Weights are relative
// to an even group, half correct, whose answers are all as long as these on average: 1 is a token's mean weight there.
function groupWeights(rewards, lengths) {
  const size = rewards.length, mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const even = rewards.map((_, i) => (i < Math.floor(size / 2) ? 1 : 0));
  const usual = mean(lengths), alike = lengths.map(() => usual);
  const kinds = {
    grpo: { withStd: true, divisors: (of) => of },
    dapo: { withStd: true, divisors: (of) => of.map(() => mean(of)) },
    dr_grpo: { withStd: false, divisors: (of) => of.map(() => 1) },
  };
  const advantagesOf = (values, withStd) => {
    if (Math.max(...values) === Math.min(...values)) return values.map(() => 0);
    const center = mean(values);
    const std = Math.sqrt(values.reduce((sum, value) => sum + (value - center) ** 2, 0) / (size - 1));
    return values.map((value) => (value - center) / (withStd ? std + 1e-4 : 1)); // TRL's floor of the std
  };
  return Object.fromEntries(Object.entries(kinds).map(([name, { withStd, divisors }]) => {
    const advantages = advantagesOf(rewards, withStd), divided = (values, of) => values.map((value, i) => value / divisors(of)[i]);
    const unit = mean(divided(advantagesOf(even, withStd), alike).map(Math.abs));
    const weights = divided(advantages, lengths).map((value) => value / unit);
    return [name, { advantages, weights, pulls: weights.map((value, i) => (value * lengths[i]) / usual) }];
  }));
}

// Returns { set(group), values(), redraw() }: another group in; what is set and computed out; for another theme.
function mountGroupWidget(element, group = {}) {
  const LABELS = { grpo: "GRPO", dapo: "DAPO (TRL's default)", dr_grpo: "Dr. GRPO" };
  const MEASURES = {
    weights: ["Weight of a token", "1: a token of an even group, half of it correct. Answers that differ only in length should weigh the same per token."],
    pulls: ["Pull of an answer", "Weight times length. 1: an answer of an even group, half of it correct."],
    advantages: ["Advantage", "Reward minus the group's mean; under GRPO and DAPO divided by its standard deviation, too."],
  };
  const USUAL = { rewards: [1, 1, 0, 0, 0, 0, 0, 0], lengths: [60, 140, 60, 100, 140, 220, 300, 400] };
  const SVG = "http://www.w3.org/2000/svg";
  let rewards, lengths, measure = "weights", rows = [];

  const make = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    made.append(...children);
    return made;
  };
  const say = (value) => (Math.abs(value) < 0.005 ? "0" : (value > 0 ? "+" : "−") + Math.abs(value).toFixed(2));
  const isBinary = () => rewards.every((reward) => reward === 0 || reward === 1);

  const bar = (name, value, reach) => {
    const drawing = document.createElementNS(SVG, "svg"), part = (value / reach) * 96;
    drawing.setAttribute("viewBox", "-100 0 200 10");
    drawing.setAttribute("preserveAspectRatio", "none");
    drawing.setAttribute("aria-hidden", "true");
    const shape = (className, x, width) => {
      const made = document.createElementNS(SVG, "rect");
      Object.entries({ class: className, x, y: 0, width, height: 10 }).forEach(([key, each]) => made.setAttribute(key, each));
      return made;
    };
    drawing.append(shape("gw-" + name, Math.min(0, part), Math.max(Math.abs(part), 0.01)), shape("gw-zero", -0.5, 1));
    return drawing;
  };

  const matchTheme = () => {
    const [r, g, b] = getComputedStyle(element).color.match(/[\d.]+/g).map(Number);
    element.classList.toggle("gw-dark", 0.3 * r + 0.6 * g + 0.1 * b > 128); // light text: a dark page
  };
  // A page may choose its theme after this, or let its reader switch.
  for (const page of [document.documentElement, document.body]) new MutationObserver(matchTheme).observe(page, { attributes: true });

  const redraw = () => {
    matchTheme();
    const found = groupWeights(rewards, lengths), names = Object.keys(LABELS);
    const reach = Math.max(1, ...names.flatMap((name) => found[name][measure].map(Math.abs)));
    rows.forEach(({ reward, said, tokens, bars }, i) => {
      const spoken = isBinary() ? (rewards[i] ? "correct" : "incorrect") : String(Number(rewards[i].toPrecision(3)));
      said.textContent = spoken;
      said.className = "gw-said" + (isBinary() ? " gw-" + spoken : "");
      reward.setAttribute("aria-valuetext", spoken);
      tokens.textContent = lengths[i] + " tokens";
      bars.replaceChildren(...names.flatMap((name) => [bar(name, found[name][measure][i], reach),
        make("span", { class: "gw-number", "data-objective": name, title: LABELS[name] }, say(found[name][measure][i]))]));
      bars.setAttribute("aria-label", names.map((name) => `${LABELS[name]} ${say(found[name][measure][i])}`).join(", "));
    });
    hint.textContent = rewards.every((reward) => reward === rewards[0]) ? "All rewards are equal: no objective learns from this group." : MEASURES[measure][1];
  };

  const slider = (label, attributes, change) => {
    const made = make("input", { type: "range", "aria-label": label, ...attributes });
    made.addEventListener("input", () => {
      change(Number(made.value));
      redraw();
    });
    return made;
  };

  const set = (given = {}) => {
    rewards = [...(given.rewards ?? USUAL.rewards)];
    lengths = [...(given.lengths ?? USUAL.lengths)].map((length) => Math.max(1, Math.round(length)));
    const longest = Math.max(400, ...lengths), step = isBinary() ? 1 : "any";
    rows = rewards.map((value, i) => ({
      reward: slider(`reward of answer ${i + 1}`, { min: Math.min(0, ...rewards), max: Math.max(1, ...rewards), step, value, class: "gw-reward" }, (to) => (rewards[i] = to)),
      length: slider(`length of answer ${i + 1} in tokens`, { min: 1, max: longest, value: lengths[i], class: "gw-length" }, (to) => (lengths[i] = to)),
      said: make("span"), tokens: make("span", { class: "gw-tokens" }), bars: make("div", { class: "gw-bars", role: "img" }),
    }));
    body.replaceChildren(...rows.map((row, i) => make("div", { class: "gw-row" },
      make("b", { class: "gw-answer" }, String(i + 1)), row.reward, row.said, row.length, row.tokens, row.bars)));
    redraw();
  };

  const choices = Object.entries(MEASURES).map(([name, [label]]) => {
    const button = make("button", { type: "button", "aria-pressed": String(name === measure) }, label);
    button.addEventListener("click", () => {
      measure = name;
      choices.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      redraw();
    });
    return button;
  });
  const keys = Object.entries(LABELS).map(([name, label]) => make("span", {}, make("i", { class: "gw-key gw-" + name }), label));
  const hint = make("p", { class: "gw-hint" }), body = make("div", { class: "gw-rows" });
  element.classList.add("group-widget");
  element.replaceChildren(make("div", { class: "gw-head" }, make("div", { role: "group", "aria-label": "What the bars show" }, ...choices), make("div", { class: "gw-keys" }, ...keys)), hint, body);
  set(group);
  return { set, redraw, values: () => ({ rewards, lengths, ...groupWeights(rewards, lengths) }) };
}
