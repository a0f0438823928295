package network

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"keelson.dev/keelson/cni"
)

// AllPodsOnOwnNetwork reports whether every pod of the node got its addresses from Keelson's own
// network. It returns false if the directory conf contains a CNI configuration. It also returns
// false if below the directory run a sandbox is recorded that another network attached. It returns
// false if a directory cannot be read.
func AllPodsOnOwnNetwork(conf, run string) bool {
	if path, err := cni.FindOperatorConfig(conf); err != nil || path != "" {
		return false
	}
	// libcni names the file of an attachment NETWORK-SANDBOX-INTERFACE.
	attached, err := os.ReadDir(filepath.Join(run, "cache", "results"))
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	for _, e := range attached {
		if !e.IsDir() && !strings.HasPrefix(e.Name(), cni.Name+"-") {
			return false
		}
	}
	return true
}
