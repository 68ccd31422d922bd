// From keys, buttons, gamepad and mouse to an action of the environment. The legend follows from the action space.
import type { Legend } from "./store";

export type Binding = { label: string; hint: string; keys: string[]; tokens: string[]; action: number[] };

const DIRECTIONS: Record<string, string[]> = {
  left: ["ArrowLeft", "a"], right: ["ArrowRight", "d"], up: ["ArrowUp", "w"], down: ["ArrowDown", "s"], fire: ["f", "Enter"],
};
const ARROWS: Record<string, string> = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓" };
const WORDS: [RegExp, string][] = [[/left/i, "left"], [/right/i, "right"], [/^up|forward|main/i, "up"], [/down|back/i, "down"], [/fire/i, "fire"]];

const tokensOf = (name: string) => WORDS.filter(([pattern]) => pattern.test(name)).map(([, token]) => token);
const hintOf = (keys: string[]) => keys.map((key) => ARROWS[key] ?? key).slice(0, 2).join(" or ");

/** Names of the entries that have a slider each: of continuous actions, and of several choices at once. */
export function sliderNames(legend: Legend): string[] {
  if (legend.kind === "continuous") return legend.names;
  return legend.classes.length > 1 ? legend.classes.map((_, index) => `choice ${index + 1}`) : [];
}

/** The buttons of the legend: each with the keys that press it. */
export function bindings(legend: Legend): Binding[] {
  if (legend.kind === "continuous") {
    return legend.names.slice(0, 2).flatMap((name, index) => {
      const [less, more] = index === 0 ? ["left", "right"] : ["down", "up"];
      const entry = (token: string, value: number): Binding => ({
        label: `${name} ${value < 0 ? "−" : "+"}`, tokens: [token], keys: DIRECTIONS[token], hint: hintOf(DIRECTIONS[token]),
        action: legend.names.map((_, at) => (at === index ? value : 0)),
      });
      return [entry(less, -1), entry(more, 1)];
    });
  }
  if (legend.classes.length > 1) return [];
  return legend.names.map((name, index) => {
    const tokens = tokensOf(name);
    const digit = index < 9 ? [String(index + 1)] : [];
    const keys = tokens.length === 1 ? [...DIRECTIONS[tokens[0]], ...digit] : digit;
    const hint = tokens.length > 1 ? tokens.map((token) => hintOf(DIRECTIONS[token].slice(0, 1))).join(" + ") : hintOf(keys);
    return { label: name.toLowerCase(), hint, keys, tokens, action: [index] };
  });
}

/** The action of all keys that are held now, or null. */
export function heldAction(legend: Legend, own: Binding[], held: Set<string>): number[] | null {
  const pressed = own.filter((binding) => binding.keys.some((key) => held.has(key)));
  if (!pressed.length) return null;
  if (legend.kind === "continuous") {
    return legend.names.map((_, at) => Math.max(-1, Math.min(1, pressed.reduce((sum, binding) => sum + binding.action[at], 0))));
  }
  const tokens = new Set(pressed.flatMap((binding) => binding.tokens));
  const exact = own.find((binding) => binding.tokens.length === tokens.size && tokens.size > 1 && binding.tokens.every((token) => tokens.has(token)));
  return (exact ?? pressed.at(-1)!).action;
}

/** What the first gamepad says, or null where it rests. */
export function padAction(legend: Legend, own: Binding[]): number[] | null {
  const pad = navigator.getGamepads?.().find((entry) => entry?.connected);
  if (!pad) return null;
  const axis = (index: number) => (Math.abs(pad.axes[index] ?? 0) > 0.25 ? pad.axes[index] : 0);
  const held = new Set<string>();
  if (pad.buttons[14]?.pressed || axis(0) < 0) held.add("ArrowLeft");
  if (pad.buttons[15]?.pressed || axis(0) > 0) held.add("ArrowRight");
  if (pad.buttons[12]?.pressed || axis(1) < 0) held.add("ArrowUp");
  if (pad.buttons[13]?.pressed || axis(1) > 0) held.add("ArrowDown");
  if (pad.buttons[0]?.pressed) held.add("f");
  if (legend.kind === "continuous" && (axis(0) || axis(1) || axis(2) || axis(3))) {
    return legend.names.map((_, at) => (at % 2 ? -axis(at) : axis(at)));
  }
  return heldAction(legend, own, held);
}
