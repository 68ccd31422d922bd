// The part of the address after # is the whole state of a view: /run?id=…&tab=curves&x=updates
import { useLayoutEffect, useState } from "preact/hooks";

export type Route = { view: string; query: URLSearchParams };

export function parse(hash: string): Route {
  const [path, search] = hash.replace(/^#\/?/, "").split("?", 2);
  return { view: path || "runs", query: new URLSearchParams(search ?? "") };
}

export function link(view: string, query: Record<string, string | string[] | null | undefined> = {}): string {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (Array.isArray(value)) value.forEach((entry) => search.append(key, entry));
    else if (value) search.set(key, value);
  }
  const text = search.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

export function useRoute(): Route {
  const [route, setRoute] = useState(() => parse(location.hash));
  // Listens before the browser may do anything else: an effect after the first paint would miss an address that changes until then.
  useLayoutEffect(() => {
    const change = () => setRoute(parse(location.hash));
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  return route;
}

/** One value of the address, and a function that changes it without a new entry in the history. */
export function useQuery(route: Route, key: string, fallback: string): [string, (value: string) => void] {
  const value = route.query.get(key) ?? fallback;
  const change = (next: string) => {
    const query = new URLSearchParams(parse(location.hash).query);
    if (next === fallback) query.delete(key);
    else query.set(key, next);
    const text = query.toString();
    history.replaceState(null, "", `#/${route.view}${text ? `?${text}` : ""}`);
    dispatchEvent(new HashChangeEvent("hashchange"));
  };
  return [value, change];
}
