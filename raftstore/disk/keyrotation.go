package disk

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"keelson.dev/keelson/internal/durable"
)

// The steps of a rotation of the key-encryption key change a key file. Each step is idempotent.
// After a crash the file has either its previous or its new content.

// AddDecryptionKey adds a key to the end of the key file. The key unwraps existing data keys, but
// does not wrap new ones. line is the result of GenerateKeyFile.
func AddDecryptionKey(path string, line []byte) error {
	return updateKeyFile(path, line, func(k *Keyring, key keyEncryptionKey) {
		if k.findKey(key.id) == nil {
			k.keys = append(k.keys, key)
		}
	})
}

// ActivateKey makes a key the first key of the key file, which wraps data keys after the file is
// loaded again. line is the result of GenerateKeyFile.
func ActivateKey(path string, line []byte) error {
	return updateKeyFile(path, line, func(k *Keyring, key keyEncryptionKey) {
		others := slices.DeleteFunc(k.keys, func(o keyEncryptionKey) bool { return o.id == key.id })
		k.keys = slices.Insert(others, 0, key)
		k.clear = false
	})
}

// RemoveKey moves the key with the given ID from the key file at path to the key file at
// archivePath. The archive is needed to read backups that were created under the key. It does
// nothing if the key is the current key, the only key, or not in the file.
func RemoveKey(path, id, archivePath string) error {
	k, err := LoadKeyring(path)
	if err != nil {
		return err
	}
	key := k.findKey(id)
	if key == nil || key.id == k.Current() || len(k.keys) == 1 {
		return nil
	}
	kept, err := LoadKeyring(archivePath)
	if errors.Is(err, os.ErrNotExist) {
		kept, err = &Keyring{}, nil
	}
	if err != nil {
		return err
	}
	if kept.findKey(id) == nil {
		kept.keys = append(kept.keys, *key)
		if err := durable.Write(archivePath, kept.fileContent(), durable.Persistent); err != nil {
			return fmt.Errorf("file of former keys: %w", err)
		}
	}
	k.keys = slices.DeleteFunc(k.keys, func(o keyEncryptionKey) bool { return o.id == id })
	if err := durable.Write(path, k.fileContent(), durable.Persistent); err != nil {
		return fmt.Errorf("key file: %w", err)
	}
	return nil
}

func updateKeyFile(path string, line []byte, change func(*Keyring, keyEncryptionKey)) error {
	further, err := parseKeyring(line)
	if err != nil {
		return err
	}
	k, err := LoadKeyring(path)
	if err != nil {
		return err
	}
	key := further.keys[0]
	if known := k.findKey(key.id); known != nil && known.secret != key.secret {
		return fmt.Errorf("%s has another key %q: %w", path, key.id, ErrKeyFile)
	}
	before := string(k.fileContent())
	change(k, key)
	if after := k.fileContent(); string(after) != before {
		if err := durable.Write(path, after, durable.Persistent); err != nil {
			return fmt.Errorf("key file: %w", err)
		}
	}
	return nil
}

// fileContent returns the keyring encoded as a key file.
func (k *Keyring) fileContent() []byte {
	out := ""
	if k.clear {
		out = clearLine + "\n"
	}
	for _, key := range k.keys {
		out += formatKeyLine(key.id, key.secret[:])
	}
	return []byte(out)
}
