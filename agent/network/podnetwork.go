package network

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"keelson.dev/keelson/cni"
)

// AllPodsOnOwnNetwork reports whether Keelson's own network assigned the addresses of all pods of
// the node. It returns false if confDir contains a CNI configuration, if runDir records a sandbox
// that another network attached, or if a directory cannot be read.
func AllPodsOnOwnNetwork(confDir, runDir string) bool {
	if path, err := cni.FindOperatorConfig(confDir); err != nil || path != "" {
		return false
	}
	// libcni names the file of an attachment NETWORK-SANDBOX-INTERFACE.
	attached, err := os.ReadDir(filepath.Join(runDir, "cache", "results"))
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
