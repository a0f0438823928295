package disk

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"keelson.dev/keelson/internal/durable"
)

// ErrSealed is returned for data that is encrypted under a missing or wrong key. The error that
// wraps it names the key and the file.
var ErrSealed = errors.New("raftstore: encrypted under a key that is missing or wrong")

// ErrKeyFile is returned for a key file that is malformed, or that other users can read.
var ErrKeyFile = errors.New("raftstore: invalid key file")

// Keyring contains the key-encryption keys of a replica. The store never writes these keys to its
// disk. It writes data keys, which are encrypted (wrapped) under the current key-encryption key.
//
// A key file has one line per key, with its ID and 32 random bytes in base64. The first key is the
// current key, which wraps new data keys. The other keys only unwrap existing data keys. The line
// "clear" before the first key means that new data is not encrypted. Empty lines and lines that
// begin with # are ignored.
type Keyring struct {
	path  string
	clear bool
	keys  []keyEncryptionKey // the current key first
}

type keyEncryptionKey struct {
	id     string
	secret [keyBytes]byte
}

const (
	keyBytes     = 32
	maxKeyID     = 64
	maxKeyFile   = 1 << 20
	clearLine    = "clear"
	keyFileModes = 0o077 // permission bits that must not be set
)

// LoadKeyring reads a key file. Only its owner may have access to the file.
func LoadKeyring(path string) (*Keyring, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("key file: %w", err)
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&keyFileModes != 0 {
		return nil, fmt.Errorf("%s has mode %v, other users must not have access (chmod 600): %w",
			path, info.Mode(), ErrKeyFile)
	}
	if info.Size() > maxKeyFile {
		return nil, fmt.Errorf("%s has %d bytes, at most %d: %w", path, info.Size(), maxKeyFile, ErrKeyFile)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("key file: %w", err)
	}
	k, err := parseKeyring(content)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	k.path = path
	return k, nil
}

func parseKeyring(content []byte) (*Keyring, error) {
	k := &Keyring{}
	lines := bufio.NewScanner(bytes.NewReader(content))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
			continue
		case line == clearLine && len(k.keys) == 0 && !k.clear:
			k.clear = true
			continue
		}
		key, err := parseKey(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w: %w", n, err, ErrKeyFile)
		}
		if k.findKey(key.id) != nil {
			return nil, fmt.Errorf("line %d: duplicate key %q: %w", n, key.id, ErrKeyFile)
		}
		k.keys = append(k.keys, key)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", err, ErrKeyFile)
	}
	if len(k.keys) == 0 {
		return nil, fmt.Errorf("no key: %w", ErrKeyFile)
	}
	return k, nil
}

// parseKey parses a line of a key file. Its errors do not contain the line, which may be a secret.
func parseKey(line string) (keyEncryptionKey, error) {
	var key keyEncryptionKey
	fields := strings.Fields(line)
	if len(fields) != 2 {
		return key, fmt.Errorf("want the ID of a key and its secret, got %d words", len(fields))
	}
	if err := checkKeyID(fields[0]); err != nil {
		return key, err
	}
	secret, err := base64.StdEncoding.Strict().DecodeString(fields[1])
	if err != nil || len(secret) != keyBytes {
		return key, fmt.Errorf("the secret of key %q is not %d bytes in base64", fields[0], keyBytes)
	}
	key.id = fields[0]
	copy(key.secret[:], secret)
	return key, nil
}

func checkKeyID(id string) error {
	if id == "" || len(id) > maxKeyID || id == clearLine {
		return fmt.Errorf("invalid key ID %q: want 1 to %d characters, and not %q", id, maxKeyID, clearLine)
	}
	for _, c := range id {
		if c <= ' ' || c > '~' || c == '#' || c == '"' {
			return fmt.Errorf("invalid key ID %q: only ASCII letters, digits and punctuation without # and quotation "+
				"marks are allowed", id)
		}
	}
	return nil
}

// findKey returns the key with an ID, or nil.
func (k *Keyring) findKey(id string) *keyEncryptionKey {
	if k == nil {
		return nil
	}
	for i := range k.keys {
		if k.keys[i].id == id {
			return &k.keys[i]
		}
	}
	return nil
}

// Current returns the ID of the current key, or "" if new data is not encrypted. It may be called
// on nil.
func (k *Keyring) Current() string {
	if k == nil || k.clear {
		return ""
	}
	return k.keys[0].id
}

// IDs returns the IDs of all keys, beginning with the current key.
func (k *Keyring) IDs() []string {
	if k == nil {
		return nil
	}
	ids := make([]string, len(k.keys))
	for i := range k.keys {
		ids[i] = k.keys[i].id
	}
	return ids
}

// source returns a description of the origin of the keys, for error messages.
func (k *Keyring) source() string {
	switch {
	case k == nil:
		return "no key file is set"
	case k.path == "":
		return "the keyring"
	default:
		return "key file " + k.path
	}
}

// GenerateKeyFile returns the content of a key file with one new key.
func GenerateKeyFile(id string) ([]byte, error) {
	line, err := generateKeyLine(id)
	return []byte(line), err
}

// Merge returns a keyring with the keys of k and other. Its current key is that of k. If k is nil,
// new data is not encrypted. Keys with the same ID must be equal.
func (k *Keyring) Merge(other *Keyring) (*Keyring, error) {
	if other == nil {
		return k, nil
	}
	out := &Keyring{path: other.path, clear: true}
	if k != nil {
		out.path, out.clear, out.keys = k.path+" and "+other.path, k.clear, slices.Clone(k.keys)
	}
	for _, key := range other.keys {
		switch known := out.findKey(key.id); {
		case known == nil:
			out.keys = append(out.keys, key)
		case known.secret != key.secret:
			return nil, fmt.Errorf("%s and %s have different keys %q: %w", k.path, other.path, key.id, ErrKeyFile)
		}
	}
	return out, nil
}

// CreateKeyFile creates a key file with one new key. The file must not exist. When CreateKeyFile
// returns nil, the file is durable.
func CreateKeyFile(path, id string) error {
	line, err := generateKeyLine(id)
	if err != nil {
		return fmt.Errorf("key file %s: %w", path, err)
	}
	o := durable.Options{Level: durable.Persistent, Exclusive: true}
	if err := durable.WriteWith(path, []byte(line), o); err != nil {
		return fmt.Errorf("key file: %w", err)
	}
	return nil
}

// AddKey adds a new key to a key file as its first key. The new key is the current key the next
// time the file is loaded. The other keys stay in the file until the operator removes them. A line
// "clear" is removed.
func AddKey(path, id string) error {
	k, err := LoadKeyring(path)
	if err != nil {
		return err
	}
	if k.findKey(id) != nil {
		return fmt.Errorf("%s: key %q exists already: %w", path, id, ErrKeyFile)
	}
	content, err := generateKeyLine(id)
	if err != nil {
		return fmt.Errorf("key file %s: %w", path, err)
	}
	for _, key := range k.keys {
		content += formatKeyLine(key.id, key.secret[:])
	}
	if err := durable.Write(path, []byte(content), durable.Persistent); err != nil {
		return fmt.Errorf("key file: %w", err)
	}
	return nil
}

func generateKeyLine(id string) (string, error) {
	if err := checkKeyID(id); err != nil {
		return "", fmt.Errorf("%w: %w", err, ErrKeyFile)
	}
	secret := make([]byte, keyBytes)
	rand.Read(secret) // never fails
	return formatKeyLine(id, secret), nil
}

func formatKeyLine(id string, secret []byte) string {
	return id + " " + base64.StdEncoding.EncodeToString(secret) + "\n"
}
