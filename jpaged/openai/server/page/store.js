// Keeps conversations and their pictures in the browser (IndexedDB), and small choices in localStorage. If the browser
// gives no storage, as in some private windows, they live as long as the page; `isKept` tells.

const NAME = "jpaged", CONVERSATIONS = "conversations";
const PICTURES = "jpaged-pictures"; // a database of its own, so that a message that grows writes none

// Open a database with one store; the same for every version of the page.
function opened(name, store, options) {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open(name, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(store, options);
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
}

export class Store {
  #database = null;
  #pictures = null;
  #memory = new Map();
  isKept = false;

  async open() {
    try {
      this.#database = await opened(NAME, CONVERSATIONS, { keyPath: "id" });
      this.#pictures = await opened(PICTURES, PICTURES);
      this.isKept = true;
    } catch {
      this.#database = this.#pictures = null;
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

  // Return the pictures of these ids that are kept, as [id, url]. Without storage none is kept here.
  async pictures(ids) {
    if (!this.#pictures) return [];
    const found = await Promise.all(ids.map(async id => [id, await this.#askPictures("readonly", store => store.get(id))]));
    return found.filter(([, url]) => url !== undefined);
  }

  async putPicture(id, url) {
    if (this.#pictures) await this.#askPictures("readwrite", store => store.put(url, id));
  }

  async deletePicture(id) {
    if (this.#pictures) await this.#askPictures("readwrite", store => store.delete(id));
  }

  #ask(mode, make) {
    return asked(this.#database, CONVERSATIONS, mode, make);
  }

  #askPictures(mode, make) {
    return asked(this.#pictures, PICTURES, mode, make);
  }
}

// Do something with a store of a database; rejects with what the browser says, as that it is full.
function asked(database, name, mode, make) {
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(name, mode), asking = make(transaction.objectStore(name));
    asking.onsuccess = () => resolve(asking.result);
    asking.onerror = () => reject(asking.error);
    transaction.onabort = () => reject(transaction.error);
  });
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
