package disk

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// ErrSealed reports data that is sealed under a key which is missing or wrong.
// It is wrapped with the id of the key and the file that needs it.
var ErrSealed = errors.New("raftstore: sealed under a key that is not there")

// ErrKeyFile reports a key file that is malformed or open to others.
var ErrKeyFile = errors.New("raftstore: bad key file")

// Keyring holds the key-encryption keys of a replica. They never touch the
// disk of the store: data keys made by the replica lie there, wrapped under
// the current one of these.
//
// A key file has a line for each key, its id and 32 random bytes in base64.
// The first key wraps what is new, the others only open what is old. The line
// "clear" before the first key says that new data is written in clear. Empty
// lines and lines that begin with # do not count.
type Keyring struct {
	path  string
	clear bool
	keys  []keyEncryptionKey // the current one first
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
	keyFileModes = 0o077 // bits that must not be set
)

// LoadKeyring reads a key file. Nobody but its owner may read or write it.
func LoadKeyring(path string) (*Keyring, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("key file: %w", err)
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&keyFileModes != 0 {
		return nil, fmt.Errorf("%s has mode %v, others must not read it (chmod 600): %w", path, info.Mode(), ErrKeyFile)
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
		if k.find(key.id) != nil {
			return nil, fmt.Errorf("line %d: key %q is there twice: %w", n, key.id, ErrKeyFile)
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

// parseKey never repeats the line in an error: it may hold a secret.
func parseKey(line string) (keyEncryptionKey, error) {
	var key keyEncryptionKey
	fields := strings.Fields(line)
	if len(fields) != 2 {
		return key, fmt.Errorf("want the id of a key and its secret, got %d words", len(fields))
	}
	if err := checkKeyID(fields[0]); err != nil {
		return key, err
	}
	secret, err := base64.StdEncoding.Strict().DecodeString(fields[1])
	if err != nil || len(secret) != keyBytes {
		return key, fmt.Errorf("secret of key %q is not %d bytes in base64", fields[0], keyBytes)
	}
	key.id = fields[0]
	copy(key.secret[:], secret)
	return key, nil
}

func checkKeyID(id string) error {
	if id == "" || len(id) > maxKeyID || id == clearLine {
		return fmt.Errorf("%q cannot be the id of a key: want 1 to %d characters and not %q", id, maxKeyID, clearLine)
	}
	for _, c := range id {
		if c <= ' ' || c > '~' || c == '#' || c == '"' {
			return fmt.Errorf("%q cannot be the id of a key: letters, digits and signs only", id)
		}
	}
	return nil
}

// find returns the key with an id, or nil.
func (k *Keyring) find(id string) *keyEncryptionKey {
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

// Current is the id of the key that wraps what is new; "" when it is written in clear.
func (k *Keyring) Current() string {
	if k == nil || k.clear {
		return ""
	}
	return k.keys[0].id
}

// IDs are the ids of all keys, the current one first.
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

// where names the source of the keys in messages.
func (k *Keyring) where() string {
	switch {
	case k == nil:
		return "no key file is set"
	case k.path == "":
		return "the key ring"
	default:
		return "key file " + k.path
	}
}

// NewKeys is the content of a key file with one new key.
func NewKeys(id string) ([]byte, error) {
	line, err := newKeyLine(id)
	return []byte(line), err
}

// With is a ring that opens what any of the two opens, and wraps under the
// current key of k; when k is nil, new data is written in clear. The ids of both
// must differ or name the same key.
func (k *Keyring) With(further *Keyring) (*Keyring, error) {
	if further == nil {
		return k, nil
	}
	out := &Keyring{path: further.path, clear: true}
	if k != nil {
		out.path, out.clear, out.keys = k.path+" and "+further.path, k.clear, slices.Clone(k.keys)
	}
	for _, key := range further.keys {
		switch known := out.find(key.id); {
		case known == nil:
			out.keys = append(out.keys, key)
		case known.secret != key.secret:
			return nil, fmt.Errorf("%s and %s have different keys %q: %w", k.path, further.path, key.id, ErrKeyFile)
		}
	}
	return out, nil
}

// NewKeyFile makes a key file with one new key. The file must not exist.
func NewKeyFile(path, id string) error {
	line, err := newKeyLine(id)
	if err != nil {
		return fmt.Errorf("key file %s: %w", path, err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("key file: %w", err)
	}
	_, err = f.WriteString(line)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("key file %s: %w", path, err)
	}
	return platter.SyncFolder(filepath.Dir(path))
}

// AddKey puts a new key before the others: it becomes the current one when the
// file is loaded next. The others stay until they are taken out by hand. A
// "clear" line is dropped.
func AddKey(path, id string) error {
	k, err := LoadKeyring(path)
	if err != nil {
		return err
	}
	if k.find(id) != nil {
		return fmt.Errorf("%s: key %q is there already: %w", path, id, ErrKeyFile)
	}
	content, err := newKeyLine(id)
	if err != nil {
		return fmt.Errorf("key file %s: %w", path, err)
	}
	for _, key := range k.keys {
		content += keyLine(key.id, key.secret[:])
	}
	if err := platter.ReplaceFile(path, []byte(content)); err != nil {
		return fmt.Errorf("key file: %w", err)
	}
	return nil
}

func newKeyLine(id string) (string, error) {
	if err := checkKeyID(id); err != nil {
		return "", fmt.Errorf("%w: %w", err, ErrKeyFile)
	}
	secret := make([]byte, keyBytes)
	rand.Read(secret) // never fails
	return keyLine(id, secret), nil
}

func keyLine(id string, secret []byte) string {
	return id + " " + base64.StdEncoding.EncodeToString(secret) + "\n"
}
