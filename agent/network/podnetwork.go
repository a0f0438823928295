package network

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"keelson.dev/keelson/cni"
)

// AllPodsOnOwnNetwork reports whether every pod of the node has its addresses from Keelson's own
// network. There must be no other configuration in directory conf, and no sandbox recorded below
// directory run that was attached with another one. It returns false if a directory cannot be read.
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
