package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"keelson.dev/keelson/internal/durable"
)

// KeyFile is the file of the node's own WireGuard key, in the agent's state folder.
const KeyFile = "wireguard.json"

// keyVersion is of the file's form. A later release may add fields; one that means something else takes the next number.
const keyVersion = 1

// keyLimit bounds the file, in bytes.
const keyLimit = 64 << 10

type keyForm struct {
	Version int    `json:"version"`
	Private string `json:"privateKey"`
}

// OpenKey reads the node's own private key from a folder, and makes one where there is none: who removes the file has the
// node get another one.
func OpenKey(folder string) (wgtypes.Key, error) {
	path := filepath.Join(folder, KeyFile)
	key, err := readKey(path)
	if !errors.Is(err, os.ErrNotExist) {
		return key, err
	}
	if key, err = wgtypes.GeneratePrivateKey(); err != nil {
		return wgtypes.Key{}, fmt.Errorf("making a WireGuard key: %w", err)
	}
	raw, err := json.Marshal(keyForm{keyVersion, key.String()})
	if err == nil {
		err = durable.Write(path, raw)
	}
	if err != nil {
		return wgtypes.Key{}, fmt.Errorf("keeping the WireGuard key: %w", err)
	}
	return key, nil
}

func readKey(path string) (wgtypes.Key, error) {
	none := wgtypes.Key{}
	f, err := os.Open(path)
	if err != nil {
		return none, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return none, err
	}
	if st.Mode().Perm()&0o077 != 0 {
		return none, fmt.Errorf("%s: others than its owner may read it (mode %04o): remove it and the node gets a new key, "+
			"or give it mode 0600 where nobody has read it", path, st.Mode().Perm())
	}
	raw, err := io.ReadAll(io.LimitReader(f, keyLimit))
	if err != nil {
		return none, fmt.Errorf("reading the WireGuard key: %w", err)
	}
	var form keyForm
	if err := json.Unmarshal(raw, &form); err != nil || form.Version < 1 {
		return none, fmt.Errorf("%s is no WireGuard key of an agent: remove it and the node gets a new one", path)
	}
	if form.Version > keyVersion {
		return none, fmt.Errorf("%s is of version %d, of a later release, and this one knows version %d: run that release, "+
			"or remove the file and the node gets a new key", path, form.Version, keyVersion)
	}
	key, err := wgtypes.ParseKey(form.Private)
	if err != nil || key == none {
		return none, fmt.Errorf("%s holds no WireGuard key: remove it and the node gets a new one", path)
	}
	return key, nil
}
