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

// KeyFile is the file with the node's WireGuard key, in the agent's state directory.
const KeyFile = "wireguard.json"

// keyVersion is the format version of KeyFile. A release may add fields without a new version, but
// a change of a field's meaning requires a new version.
const keyVersion = 1

// keyLimit is the maximum size of KeyFile, in bytes.
const keyLimit = 64 << 10

type keyFile struct {
	Version int    `json:"version"`
	Private string `json:"privateKey"`
}

// OpenKey reads the node's private WireGuard key from KeyFile in a directory. If the file does not
// exist, it creates a key and stores it. To replace the key, an operator removes the file.
func OpenKey(folder string) (wgtypes.Key, error) {
	path := filepath.Join(folder, KeyFile)
	key, err := readKey(path)
	if !errors.Is(err, os.ErrNotExist) {
		return key, err
	}
	if key, err = wgtypes.GeneratePrivateKey(); err != nil {
		return wgtypes.Key{}, fmt.Errorf("creating a WireGuard key: %w", err)
	}
	raw, err := json.Marshal(keyFile{keyVersion, key.String()})
	if err == nil {
		err = durable.WriteIfChanged(path, raw, durable.Intact)
	}
	if err != nil {
		return wgtypes.Key{}, fmt.Errorf("storing the WireGuard key: %w", err)
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
		return none,
			fmt.Errorf("%s: users other than its owner may read it (mode %04o): remove it to give the node a new key, "+
				"or set mode 0600 if nobody has read it", path, st.Mode().Perm())
	}
	raw, err := io.ReadAll(io.LimitReader(f, keyLimit))
	if err != nil {
		return none, fmt.Errorf("reading the WireGuard key: %w", err)
	}
	var form keyFile
	if err := json.Unmarshal(raw, &form); err != nil || form.Version < 1 {
		return none, fmt.Errorf("%s is not a WireGuard key file of an agent: remove it to give the node a new key",
			path)
	}
	if form.Version > keyVersion {
		return none,
			fmt.Errorf("%s has version %d of a later release, and this release supports version %d: run that release, "+
				"or remove the file to give the node a new key", path, form.Version, keyVersion)
	}
	key, err := wgtypes.ParseKey(form.Private)
	if err != nil || key == none {
		return none, fmt.Errorf("%s contains no valid WireGuard key: remove it to give the node a new key", path)
	}
	return key, nil
}
