package disk

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// Steps in which a key file goes from one key to another. Each can be done again, and a crash leaves the file of before
// or the one of after it.

// BelieveKey puts a key, a line as NewKeys makes it, behind the others: it opens what is sealed and seals nothing yet.
func BelieveKey(path string, line []byte) error {
	return changeKeys(path, line, func(k *Keyring, key keyEncryptionKey) {
		if k.find(key.id) == nil {
			k.keys = append(k.keys, key)
		}
	})
}

// UseKey puts a key before the others: it wraps what is new when the file is loaded next.
func UseKey(path string, line []byte) error {
	return changeKeys(path, line, func(k *Keyring, key keyEncryptionKey) {
		k.keys = slices.Insert(slices.DeleteFunc(k.keys, func(o keyEncryptionKey) bool { return o.id == key.id }), 0, key)
		k.clear = false
	})
}

// DropKey takes a key out, unless it is the current one, and puts it into the file of former keys first: backups need it
// that were made under it.
func DropKey(path, id, former string) error {
	k, err := LoadKeyring(path)
	if err != nil {
		return err
	}
	key := k.find(id)
	if key == nil || key.id == k.Current() || len(k.keys) == 1 {
		return nil
	}
	kept, err := LoadKeyring(former)
	if errors.Is(err, os.ErrNotExist) {
		kept, err = &Keyring{}, nil
	}
	if err != nil {
		return err
	}
	if kept.find(id) == nil {
		kept.keys = append(kept.keys, *key)
		if err := platter.ReplaceFile(former, kept.content()); err != nil {
			return fmt.Errorf("file of former keys: %w", err)
		}
	}
	k.keys = slices.DeleteFunc(k.keys, func(o keyEncryptionKey) bool { return o.id == id })
	if err := platter.ReplaceFile(path, k.content()); err != nil {
		return fmt.Errorf("key file: %w", err)
	}
	return nil
}

func changeKeys(path string, line []byte, change func(*Keyring, keyEncryptionKey)) error {
	further, err := parseKeyring(line)
	if err != nil {
		return err
	}
	k, err := LoadKeyring(path)
	if err != nil {
		return err
	}
	key := further.keys[0]
	if known := k.find(key.id); known != nil && known.secret != key.secret {
		return fmt.Errorf("%s has another key %q: %w", path, key.id, ErrKeyFile)
	}
	before := string(k.content())
	change(k, key)
	if after := k.content(); string(after) != before {
		if err := platter.ReplaceFile(path, after); err != nil {
			return fmt.Errorf("key file: %w", err)
		}
	}
	return nil
}

// content is the ring as a key file.
func (k *Keyring) content() []byte {
	out := ""
	if k.clear {
		out = clearLine + "\n"
	}
	for _, key := range k.keys {
		out += keyLine(key.id, key.secret[:])
	}
	return []byte(out)
}
