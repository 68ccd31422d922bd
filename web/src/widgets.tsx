// Small parts that every view uses.
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

const BADGES: Record<string, string> = {
  completed: "good", running: "run", interrupted: "warn", lost: "bad", failed: "bad", unknown: "warn",
};

export function Badge({ status }: { status: string }) {
  const words = status === "lost" ? "stopped without a word" : status;
  return <span class={`badge ${BADGES[status] ?? "warn"}`}>{words}</span>;
}

/** One clear line where something went wrong. */
export function Notice({ text, kind = "bad" }: { text: string | null; kind?: string }) {
  return text ? <p class={`notice ${kind}`} role="alert">{text}</p> : null;
}

export function Copy({ text, label }: { text: string; label: string }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return <button class="plain" onClick={copy} title={text} aria-label={`Copy ${label}`}>{done ? "copied" : label}</button>;
}

export function Choice<T extends string>(props: {
  label: string; value: T; options: readonly (readonly [T, string])[]; change: (value: T) => void; title?: string;
}) {
  return (
    <label class="field" title={props.title}>
      {props.label && <span>{props.label}</span>}
      <select value={props.value} aria-label={props.label ? undefined : props.title} onChange={(event) => props.change(event.currentTarget.value as T)}>
        {props.options.map(([value, text]) => <option value={value}>{text}</option>)}
      </select>
    </label>
  );
}

export function Slider(props: {
  label: string; value: number; min: number; max: number; step: number; change: (value: number) => void;
  shown?: string; title?: string; disabled?: boolean;
}) {
  return (
    <label class="field" title={props.title}>
      <span>{props.label} <b>{props.shown ?? props.value}</b></span>
      <input type="range" min={props.min} max={props.max} step={props.step} value={props.value} disabled={props.disabled}
        onInput={(event) => props.change(Number(event.currentTarget.value))} />
    </label>
  );
}

/** Buttons of which one is chosen. `off`: the ones that cannot be chosen now, with the reason. */
export function Segments<T extends string>(props: {
  label: string; value: T; options: readonly (readonly [T, string, string?])[]; change: (value: T) => void; off?: Partial<Record<T, string>>;
}) {
  return (
    <div class="segments" role="group" aria-label={props.label}>
      {props.options.map(([value, text, title]) => (
        <button aria-pressed={props.value === value} title={props.off?.[value] ?? title} disabled={value in (props.off ?? {})}
          class={props.value === value ? "on" : ""} onClick={() => props.change(value)}>{text}</button>
      ))}
    </div>
  );
}

export function Card(props: { title: string; text?: string; children: ComponentChildren; id?: string }) {
  return (
    <section id={props.id}>
      <h2>{props.title}</h2>
      {props.text && <p class="quiet">{props.text}</p>}
      {props.children}
    </section>
  );
}

/** Call `work` now and then again `seconds` after it has ended, while the page is visible. */
export function usePolling(work: () => Promise<void>, seconds: number, keys: unknown[]) {
  const latest = useRef(work);
  latest.current = work;
  useEffect(() => {
    let timer = 0;
    let alive = true;
    const turn = async () => {
      if (!document.hidden) await latest.current().catch(() => undefined);
      if (alive) timer = window.setTimeout(turn, seconds * 1000);
    };
    void turn();
    return () => {
      alive = false;
      clearTimeout(timer);
    };
  }, keys);
}

/** Keys of a view; they rest while somebody types. */
export function useKeys(handlers: Record<string, (event: KeyboardEvent) => void>) {
  const latest = useRef(handlers);
  latest.current = handlers;
  useLayoutEffect(() => {
    const press = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      const typing = target.matches("input:not([type=range]):not([type=checkbox]), textarea, select");
      if (typing && event.key === "Escape") target.blur();
      if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
      const handler = latest.current[event.key];
      if (handler) {
        handler(event);
        event.preventDefault();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}
