// Keeps conversations in the browser (IndexedDB), and small choices in localStorage. If the browser
// gives no storage, as in some private windows, they live as long as the page; `isKept` tells.

const NAME = "jpaged", CONVERSATIONS = "conversations";

export class Store {
  #database = null;
  #memory = new Map();
  isKept = false;

  async open() {
    try {
      this.#database = await new Promise((resolve, reject) => {
        const opening = indexedDB.open(NAME, 1);
        opening.onupgradeneeded = () => opening.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
        opening.onsuccess = () => resolve(opening.result);
        opening.onerror = () => reject(opening.error);
      });
      this.isKept = true;
    } catch {
      this.#database = null;
    }
  }

  // Return all conversations, the one that changed last first.
  async all() {
    const found = this.#database ? await this.#ask("readonly", store => store.getAll()) : [...this.#memory.values()];
    return found.sort((a, b) => b.updated - a.updated);
  }

  async put(conversation) {
    if (this.#database) await this.#ask("readwrite", store => store.put(conversation));
    else this.#memory.set(conversation.id, structuredClone(conversation));
  }

  async delete(id) {
    if (this.#database) await this.#ask("readwrite", store => store.delete(id));
    else this.#memory.delete(id);
  }

  #ask(mode, make) {
    return new Promise((resolve, reject) => {
      const asking = make(this.#database.transaction(CONVERSATIONS, mode).objectStore(CONVERSATIONS));
      asking.onsuccess = () => resolve(asking.result);
      asking.onerror = () => reject(asking.error);
    });
  }
}

// A value that is kept as JSON under a name.
export function kept(name, otherwise) {
  try {
    const text = localStorage.getItem(`jpaged.${name}`);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(`jpaged.${name}`, JSON.stringify(value));
  } catch {
    // Without storage it lasts as long as the page.
  }
}
